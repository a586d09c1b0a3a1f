"""Which documents are held out: decided by their text alone, so that training never meets them wherever they recur."""

from __future__ import annotations

from hashlib import blake2b


def is_held_out(text: str, share: float) -> bool:
    """Does the document belong to the `share` of all documents that is held out?"""
    if not share:
        return False
    draw = int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
    return draw < share * 2**64
