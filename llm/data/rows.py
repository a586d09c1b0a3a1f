"""Rows of packed tokens, and the endless sequence of them that training draws from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from llm.data.batch import IGNORED, Batch
from llm.data.order import Feistel, derive_key, digest
from llm.data.store import TokenStore
from llm.errors import UserError


@dataclass(frozen=True)
class Row:
    """context + 1 tokens: inputs are all but the last, targets all but the first.

    ids    int [context + 1]
    starts int [context + 1]    index in the row of the first token of each token's document (0: or before the row).
                                Padding is documents of one token, so that nothing sees or predicts it.
    counted bool [context]      targets that the loss counts; None: all
    padding                     padding tokens among the inputs
    """

    ids: np.ndarray
    starts: np.ndarray
    counted: np.ndarray | None = None
    padding: int = 0

    def targets(self) -> np.ndarray:
        """int64 [context]: the next token, IGNORED where that one begins another document or is not counted."""
        begins = self.starts[1:] == np.arange(1, len(self.starts))
        keep = ~begins if self.counted is None else ~begins & self.counted
        return np.where(keep, self.ids[1:].astype(np.int64), IGNORED)

    def joined(self) -> Row:
        """The row as one document: tokens see, and are predicted across, the boundaries."""
        real = len(self.ids) - self.padding
        return replace(self, starts=np.where(np.arange(len(self.ids)) < real, 0, self.starts))


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

    def place(self, row: int) -> Place:
        """Where global row `row` comes from: a pure function."""

    def open_lane(self, lane: str, state: Any = None) -> Lane:
        """The lane, at its beginning or at a state."""

    def lanes(self) -> list[str]:
        """The names of all lanes."""

    def summary(self) -> dict[str, Any]:
        """What is known of the data: documents, tokens, rows an epoch."""


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
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(row_start), state)


class StoredRows:
    """Rows cut from a store of tokens laid end to end, in an order renewed each epoch by a keyed permutation.

    An epoch cuts the circle of all tokens into rows from a starting point of its own, so that documents are not cut at
    the same places again; fewer than `context` tokens are left over. The state is the row's number alone.
    """

    def __init__(self, name: str, store: TokenStore, context: int, *, seed: int, separate: bool = True) -> None:
        if store.n_tokens < context + 1:
            raise UserError(
                f"data={name}: the text has {store.n_tokens:,} tokens, fewer than one row of context + 1 = "
                f"{context + 1:,}. Give more text or a smaller context."
            )
        self.name, self.context, self.store, self._separate = name, context, store, separate
        self.n_rows = store.n_tokens // context  # an epoch
        self.fingerprint = digest("stored", store.fingerprint, context, seed, separate)
        self._seed = seed
        self._epoch: tuple[int, Feistel, int] = (-1, Feistel(1, 0), 0)

    def place(self, row: int) -> Place:
        return Place("0", row)

    def lanes(self) -> list[str]:
        return ["0"]

    def open_lane(self, lane: str, state: Any = None) -> StoredRows:
        return self

    def state(self) -> None:
        return None

    def read(self, index: int) -> Row:
        epoch, position = divmod(index, self.n_rows)
        order, offset = self._order(epoch)
        ids, first = self.store.read((offset + order(position) * self.context) % self.store.n_tokens, self.context + 1)
        row = Row(ids, starts_within(first, self.context + 1))
        return row if self._separate else row.joined()

    def summary(self) -> dict[str, Any]:
        return {"documents": self.store.n_documents, "tokens": self.store.n_tokens, "rows_per_epoch": self.n_rows}

    def _order(self, epoch: int) -> tuple[Feistel, int]:
        """The permutation of an epoch's rows and the token at which its first row begins."""
        if self._epoch[0] != epoch:
            offset = derive_key(self._seed, "offset", epoch) % self.store.n_tokens
            self._epoch = epoch, Feistel(self.n_rows, derive_key(self._seed, "rows", epoch)), offset
        return self._epoch[1], self._epoch[2]


class HeldOutRows:
    """Held-out text cut into rows in its own order, each token predicted at most once; the last row is padded."""

    def __init__(self, name: str, store: TokenStore, context: int, *, padding_id: int, separate: bool = True) -> None:
        if store.n_tokens < 2:
            raise UserError(f"data: the held-out set {name!r} has no text to predict (data.validation_path).")
        self.name, self.context, self.store = name, context, store
        self._padding_id, self._separate = padding_id, separate
        self.fingerprint = digest("held-out", store.fingerprint, context, separate)

    def __len__(self) -> int:
        return -(-(self.store.n_tokens - 1) // self.context)

    @property
    def tokens(self) -> int:
        """Predicted tokens: all but the first of each document and of the whole where documents are joined."""
        return self.store.n_tokens - (self.store.n_documents if self._separate else 1)

    def read(self, index: int) -> Row:
        """Row `index` of len(self)."""
        at = index * self.context
        ids, first = self.store.read(at, min(self.context + 1, self.store.n_tokens - at))
        missing = self.context + 1 - len(ids)
        pads = np.arange(len(ids), len(ids) + missing)
        ids = np.concatenate([ids, np.full(missing, self._padding_id, ids.dtype)])
        row = Row(ids, starts_within(np.concatenate([first, pads]), self.context + 1), padding=missing)
        return row if self._separate else row.joined()

    def unigram_entropy(self) -> float:
        """Nats a token of the held-out tokens' own unigram distribution: the least loss without any context."""
        return self.store.unigram_entropy()
