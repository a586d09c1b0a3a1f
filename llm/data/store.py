"""Tokens of whole documents laid end to end, in memory or in memory-mapped files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llm.data.order import digest


@dataclass(frozen=True)
class Piece:
    """A run of whole documents.

    tokens int [n]             (an array or a memory map)
    first  int64 [documents]   index of each document's first token; first[0] == 0
    """

    tokens: np.ndarray
    first: np.ndarray

    def __reduce__(self) -> tuple[Any, ...]:
        """A memory map travels to another process as the file's name, not as its contents."""
        if isinstance(self.tokens, np.memmap) and self.tokens.offset == 0:
            return _map_piece, (self.tokens.filename, self.tokens.dtype, len(self.tokens), self.first)
        return Piece, (np.asarray(self.tokens), self.first)


def _map_piece(filename: str, dtype: np.dtype, n_tokens: int, first: np.ndarray) -> Piece:
    return Piece(np.memmap(filename, dtype=dtype, mode="r", shape=(n_tokens,)), first)


class TokenStore:
    """Pieces seen as one circle of tokens: after the last token comes the first."""

    def __init__(self, pieces: list[Piece], fingerprint: str) -> None:
        self.pieces = [piece for piece in pieces if len(piece.tokens)]
        self.fingerprint = fingerprint
        self._ends = np.cumsum([len(piece.tokens) for piece in self.pieces]).tolist()

    @property
    def n_tokens(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def n_documents(self) -> int:
        return sum(len(piece.first) for piece in self.pieces)

    def read(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens from `start` on, and the indices among them at which documents begin."""
        tokens, first, done = [], [], 0
        while done < length:
            at = (start + done) % self.n_tokens
            index = bisect_right(self._ends, at)
            piece, inside = self.pieces[index], at - (self._ends[index] - len(self.pieces[index].tokens))
            taken = piece.tokens[inside : inside + length - done]
            low, high = np.searchsorted(piece.first, [inside, inside + len(taken)])
            tokens.append(taken)
            first.append(piece.first[low:high] - inside + done)
            done += len(taken)
        return np.concatenate(tokens), np.concatenate(first)

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64."""
        ends = [np.append(piece.first[1:], len(piece.tokens)) for piece in self.pieces]
        return np.concatenate([end - piece.first for end, piece in zip(ends, self.pieces, strict=True)])

    def head(self, max_tokens: int) -> TokenStore:
        """The store up to the document that reaches `max_tokens`."""
        pieces, left = [], max_tokens
        for piece in self.pieces:
            n_documents = int(np.searchsorted(piece.first, left))
            end = int(piece.first[n_documents]) if n_documents < len(piece.first) else len(piece.tokens)
            pieces.append(Piece(piece.tokens[:end], piece.first[:n_documents]))
            left -= end
        return TokenStore(pieces, digest(self.fingerprint, max_tokens))

    def unigram_entropy(self) -> float:
        """Entropy of the distribution of single tokens, in nats."""
        n_ids = max(int(piece.tokens.max()) for piece in self.pieces) + 1
        counts = sum(np.bincount(piece.tokens, minlength=n_ids) for piece in self.pieces)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


def store_documents(documents: Iterable[np.ndarray], *, max_tokens: int | None = None) -> TokenStore:
    """The documents' tokens in memory; stops after the document that reaches `max_tokens`."""
    kept, total = [], 0
    for document in documents:
        kept.append(document)
        total += len(document)
        if max_tokens is not None and total >= max_tokens:
            break
    if not kept:
        return TokenStore([], digest("nothing"))
    first = np.cumsum([0, *map(len, kept[:-1])], dtype=np.int64)
    tokens = np.concatenate(kept)
    return TokenStore([Piece(tokens, first)], digest(_hash(tokens), _hash(first)))


def _hash(array: np.ndarray) -> str:
    import hashlib

    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
