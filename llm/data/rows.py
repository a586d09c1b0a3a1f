"""Rows of packed tokens, and the endless sequence of them that training draws from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from llm.data.batch import IGNORED, Batch


@dataclass(frozen=True)
class Row:
    """context + 1 tokens: inputs are all but the last, targets all but the first.

    ids    int [context + 1]
    starts int [context + 1]    index in the row of the first token of each token's document (0: or before the row).
                                Padding is documents of one token, so that nothing sees or predicts it.
    labels int64 [context]      the targets, where they are not simply the next tokens (IGNORED where none counts)
    padding                     padding tokens among the inputs
    whole                       the source's rows are one document each (but for padding at their end)
    """

    ids: np.ndarray
    starts: np.ndarray
    labels: np.ndarray | None = None
    padding: int = 0
    whole: bool = False

    def targets(self) -> np.ndarray:
        """int64 [context]: the labels, else the next token, IGNORED where that one begins another document."""
        if self.labels is not None:
            return self.labels
        begins = self.starts[1:] == np.arange(1, len(self.starts))
        return np.where(begins, IGNORED, self.ids[1:].astype(np.int64))

    def joined(self) -> Row:
        """The row as one document: tokens see, and are predicted across, the boundaries."""
        real = len(self.ids) - self.padding
        return replace(self, starts=np.where(np.arange(len(self.ids)) < real, 0, self.starts), whole=True)


class Place(NamedTuple):
    """Where a row of the global sequence comes from: row `index` of lane `lane`."""

    lane: str
    index: int


class Lane(Protocol):
    """One of the independent sequences of rows that the global sequence interleaves."""

    def read(self, index: int) -> Row:
        """Row `index`; calls come with growing index."""

    def state(self) -> Any:
        """JSON data from which `Rows.open_lane` continues after the last row read; None if the index says it all."""


class Rows(Protocol):
    """One endless logical sequence of packed rows."""

    name: str
    context: int
    fingerprint: str  # of all that decides the sequence
    n_rows: int | None  # of an epoch; None: not known

    def place(self, row: int) -> Place:
        """Where global row `row` comes from: a pure function."""

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> Lane:
        """The lane, ready to read row `index`; `state` is the one after row index - 1 (None: the lane's beginning)."""

    def lanes(self) -> list[str]:
        """The names of all lanes."""

    def summary(self) -> dict[str, Any]:
        """What is known of the data: documents, tokens, rows an epoch."""

    def document_lengths(self, at_most: int) -> np.ndarray:
        """Tokens of each of some documents, int64; none where there are no documents."""

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        """`data_tokens` served up to a `batch.state` and `data_epochs` they make; of mixtures, data_tokens/<source>."""


class HeldOut(Protocol):
    """Rows in a fixed order, to validate on."""

    name: str
    context: int
    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Row:
        """Row `index` of len(self)."""

    @property
    def tokens(self) -> int:
        """Predicted tokens."""

    def unigram_entropy(self) -> float:
        """Nats a token of the tokens' own unigram distribution: the least loss without any context."""


def starts_within(first: np.ndarray, length: int) -> np.ndarray:
    """int32 [length]: for each token the index of its document's first token, given where documents begin."""
    starts = np.zeros(length, dtype=np.int32)
    starts[first] = first
    return np.maximum.accumulate(starts)


def collate(rows: list[Row], state: dict[str, Any]) -> Batch:
    """The rows as one batch."""
    tokens = np.stack([row.ids[:-1] for row in rows]).astype(np.int64)
    targets = np.stack([row.targets() for row in rows])
    row_start = np.stack([row.starts[:-1] for row in rows]).astype(np.int32)
    whole = all(row.whole for row in rows)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(row_start), state, whole)
