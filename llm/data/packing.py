"""Best-fit packing: documents that fit a row are never cut (Ding et al. 2024, "Fewer Truncations")."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from llm.data.order import permutation
from llm.data.rows import Row, starts_within


class Span(NamedTuple):
    """Tokens start .. end of a document."""

    document: int
    start: int
    end: int


def pack_best_fit(lengths: list[int], context: int, key: int) -> list[list[Span]]:
    """Rows of at most context + 1 tokens, each a list of pieces of documents of the given lengths.

    Best-fit decreasing: each piece, longest first, goes into the fullest row that still holds it. Only documents longer
    than a row are cut; the second piece begins with the first one's last token, so that every token is predicted. The
    rows come in an order that `key` decides (packing leaves the long documents first).
    """
    capacity = context + 1
    pieces = [piece for document, length in enumerate(lengths) for piece in _pieces(document, length, context)]
    pieces.sort(key=lambda piece: piece.start - piece.end)
    rows: list[list[Span]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for piece in pieces:
        size = piece.end - piece.start
        at = bisect_left(room, (size, -1))
        free, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        insort(room, (free - size, row))
    return [rows[index] for index in permutation(len(rows), key)]


def _pieces(document: int, length: int, context: int) -> list[Span]:
    starts = range(0, max(1, length - 1), context)
    return [Span(document, start, min(start + context + 1, length)) for start in starts]


def assemble(parts: list[np.ndarray], context: int, padding_id: int) -> Row:
    """The row that holds the given pieces of documents, padded at its end."""
    ends = np.cumsum([len(part) for part in parts])
    n_tokens, length = int(ends[-1]), context + 1
    padding = np.full(length - n_tokens, padding_id, dtype=parts[0].dtype)
    first = np.concatenate([ends[:-1], np.arange(n_tokens, length)])
    return Row(np.concatenate([*parts, padding]), starts_within(first, length), padding=len(padding))
