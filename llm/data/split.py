"""Which documents are held out: decided by their text alone, so that training never meets them wherever they recur."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

from llm.data.shards import documents_of
from llm.errors import UserError

if TYPE_CHECKING:
    from llm.data.shards import Shard

NO_VALIDATION = "data.held_out=0 (no validation)"


def is_held_out(text: str, share: float) -> bool:
    """Does the document belong to the `share` of all documents that is held out?"""
    if not share:
        return False
    draw = int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
    return draw < share * 2**64


def nothing_left(where: str, shards: Iterable[Shard], share: float) -> UserError:
    """The error for text that leaves nothing to train on: all of it is held out, or there is none."""
    if share and next(documents_of(shards), None) is not None:
        return UserError(
            f"{where}: data.held_out={share} holds out every document and leaves none to train on. Give other text to "
            f"validate on by data.validation_path=..., or set {NO_VALIDATION}."
        )
    return UserError(f"{where}: no document has any text (data.path, data.text_column).")


def nothing_held_out(where: str, share: float) -> UserError:
    """The error for text of which no document falls into the share that is held out."""
    return UserError(
        f"{where}: data.held_out={share} holds out no document, there are too few. Give other text to validate on by "
        f"data.validation_path=..., or set {NO_VALIDATION}; or raise it where there are many documents."
    )
