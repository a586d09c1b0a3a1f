"""What rows look like, for people: decoded with their boundaries, and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm.data.batch import IGNORED
from llm.data.rows import Row, Rows
from llm.data.workers import LaneReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BAR = 50  # characters of the longest bar of a histogram


@dataclass
class Sample:
    """Some rows of the sequence, counted.

    counted  targets that the loss counts
    pieces   documents or parts of documents in the rows
    cut      those of them that go on after their row
    """

    rows: list[Row]
    sources: Counter[str]
    counted: int = 0
    padding: int = 0
    pieces: int = 0
    cut: int = 0

    @property
    def inputs(self) -> int:
        """All tokens that go in."""
        return sum(len(row.ids) - 1 for row in self.rows)


def take_sample(rows: Rows, n: int, *, eos_id: int) -> Sample:
    """The first `n` rows of the global sequence."""
    reader = LaneReader(rows, {})
    sample = Sample([reader.read(i).row for i in range(n)], Counter(_source(rows.place(i).lane) for i in range(n)))
    for row in sample.rows:
        real = len(row.ids) - 1 - row.padding
        firsts = np.unique(row.starts[:real])
        lasts = np.append(firsts[1:], real) - 1
        sample.pieces += len(firsts)
        sample.cut += int((row.ids[lasts] != eos_id).sum())
        sample.padding += row.padding
        sample.counted += int((row.targets() != IGNORED).sum())
    return sample


def _source(lane: str) -> str:
    """The source's name in the lane of a mixture; '' otherwise."""
    return lane.rpartition(":")[0]


def describe_row(row: Row, tokenizer: PreTrainedTokenizerBase, *, width: int = 160) -> list[str]:
    """A line for each document or part of one: where it begins, its length, the beginning and end of its text."""
    real = len(row.ids) - 1 - row.padding
    firsts = np.unique(row.starts[:real])
    lines = []
    for first, end in zip(firsts, np.append(firsts[1:], real), strict=True):
        text = repr(tokenizer.decode(row.ids[first:end]))[1:-1]
        short = text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"
        lines.append(f"{first:>7} +{end - first:<6} | {short}")
    if row.padding:
        lines.append(f"{real:>7} +{row.padding:<6} | (padding)")
    return lines


def histogram(lengths: np.ndarray) -> list[str]:
    """Lines of a histogram of document lengths, in bins that double."""
    bins = np.bincount(np.log2(np.maximum(lengths, 1)).astype(int))
    return [
        f"{2**i:>9,} to {2 ** (i + 1) - 1:>9,} | {'#' * round(BAR * count / bins.max()):<{BAR}} {count:,}"
        for i, count in enumerate(bins)
        if count or i > np.log2(lengths.min()) - 1
    ]
