"""Rows of tokens that are at hand, in memory or in memory-mapped files: any row can be read at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm.data.order import Feistel, derive_key, digest
from llm.data.rows import Place, Row, starts_within
from llm.data.store import TokenStore
from llm.errors import UserError


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

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> StoredRows:
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
            raise UserError(
                f"data: the held-out set {name!r} has no text: give data.validation_path, or raise data.held_out."
            )
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
