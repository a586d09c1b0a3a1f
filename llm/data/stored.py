"""Rows of tokens that are at hand, in memory or in memory-mapped files: any row can be read at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from llm.data.order import Feistel, derive_key, digest, permutation
from llm.data.packing import Span, assemble, pack_best_fit
from llm.data.rows import Place, Row, starts_within
from llm.data.store import TokenStore
from llm.errors import UserError

WINDOW_ROWS = 256  # rows packed together: more pad less (about 1 / WINDOW_ROWS), but packing them takes longer
GROUP = 64  # windows whose rows are mixed


class Layout(Protocol):
    """How the tokens of a store are laid out in the rows of an epoch."""

    store: TokenStore
    context: int
    n_rows: int
    kind: str

    def order(self, key: int) -> Callable[[int], int]:
        """A permutation of the rows: which row comes at a position."""

    def read(self, row: int, shift: int) -> Row:
        """Row `row` of the epoch; `shift` is a large number of the epoch's own."""


class CutLayout:
    """Documents end to end, cut into rows.

    An epoch cuts the circle of all tokens from a starting point of its own, so that documents are not cut at the same
    places again; fewer than `context` tokens are left over.
    """

    kind = "cut"

    def __init__(self, store: TokenStore, context: int) -> None:
        self.store, self.context, self.n_rows = store, context, store.n_tokens // context

    def order(self, key: int) -> Feistel:
        return Feistel(self.n_rows, key)

    def read(self, row: int, shift: int) -> Row:
        ids, first = self.store.read((shift + row * self.context) % self.store.n_tokens, self.context + 1)
        return Row(ids, starts_within(first, self.context + 1))


class FitLayout:
    """Documents packed best fit, a window of consecutive documents at a time: only what is longer than a row is cut.

    Setting up packs all windows once, to number the rows; it keeps 8 bytes a document. An epoch takes `GROUP` windows
    from anywhere and goes through their rows in a random order, so that a window is packed once an epoch.
    """

    kind = "fit"

    def __init__(self, store: TokenStore, context: int, padding_id: int) -> None:
        self.store, self.context, self._padding_id = store, context, padding_id
        self._ends = np.cumsum(store.lengths())
        self._windows = self._cut_windows()
        self._first_rows = np.cumsum([0, *(len(self._bins(window)) for window in range(len(self._windows) - 1))])
        self.n_rows = int(self._first_rows[-1])
        self._packed: dict[int, list[list[Span]]] = {}  # the windows packed last

    def order(self, key: int) -> GroupedOrder:
        return GroupedOrder(self._first_rows, key)

    def read(self, row: int, shift: int) -> Row:
        window = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        if window not in self._packed:
            if len(self._packed) >= GROUP:
                self._packed.pop(next(iter(self._packed)))
            self._packed[window] = self._bins(window)
        pieces = self._packed[window][row - int(self._first_rows[window])]
        first_document = self._windows[window]
        parts = [self._tokens(first_document + piece.document, piece.start, piece.end) for piece in pieces]
        return assemble(parts, self.context, self._padding_id)

    def _tokens(self, document: int, start: int, end: int) -> np.ndarray:
        begins = int(self._ends[document - 1]) if document else 0
        return self.store.read(begins + start, end - start)[0]

    def _cut_windows(self) -> list[int]:
        """The first document of each window, and the number of documents."""
        firsts, total = [0], WINDOW_ROWS * (self.context + 1)
        while firsts[-1] < len(self._ends):
            before = int(self._ends[firsts[-1] - 1]) if firsts[-1] else 0
            firsts.append(min(int(np.searchsorted(self._ends, before + total)) + 1, len(self._ends)))
        return firsts

    def _bins(self, window: int) -> list[list[Span]]:
        first, last = self._windows[window], self._windows[window + 1]
        lengths = np.diff(self._ends[first:last], prepend=self._ends[first - 1] if first else 0)
        return pack_best_fit(lengths.tolist(), self.context, window)


class GroupedOrder:
    """A permutation of rows that stays with `GROUP` windows, drawn from anywhere, until all their rows have come."""

    def __init__(self, first_rows: np.ndarray, key: int) -> None:
        self._first_rows, self._key = first_rows, key
        self._windows = np.asarray(permutation(len(first_rows) - 1, key))
        sizes = np.diff(first_rows)[self._windows]
        self._ends = np.cumsum(sizes)  # positions at which the windows end, in the order of the permutation
        self._group: tuple[int, Feistel, int] = (-1, Feistel(1, 0), 0)

    def __call__(self, position: int) -> int:
        """The row at a position."""
        group = int(np.searchsorted(self._ends, position, side="right")) // GROUP
        if self._group[0] != group:
            start = int(self._ends[group * GROUP - 1]) if group else 0
            end = int(self._ends[min((group + 1) * GROUP, len(self._ends)) - 1])
            self._group = group, Feistel(end - start, derive_key(self._key, group)), start
        _, order, start = self._group
        place = start + order(position - start)
        index = int(np.searchsorted(self._ends, place, side="right"))
        before = int(self._ends[index - 1]) if index else 0
        return int(self._first_rows[self._windows[index]]) + place - before


def pack(store: TokenStore, context: int, packing: str, *, padding_id: int) -> Layout:
    """The layout that `data.packing` names."""
    return CutLayout(store, context) if packing == "cut" else FitLayout(store, context, padding_id)


class StoredRows:
    """The rows of a layout in an order renewed each epoch by a keyed permutation. The state is the row's number."""

    def __init__(self, name: str, layout: Layout, *, seed: int, separate: bool = True) -> None:
        self.name, self.context, self.store, self.n_rows = name, layout.context, layout.store, layout.n_rows
        if self.n_rows < 1:
            raise UserError(
                f"data={name}: the text has {self.store.n_tokens:,} tokens, fewer than one row of context = "
                f"{self.context:,}. Give more text or a smaller context."
            )
        self._layout, self._seed, self._separate = layout, seed, separate
        self.fingerprint = digest("stored", self.store.fingerprint, self.context, layout.kind, seed, separate)
        self._order: tuple[int, Callable[[int], int]] = (-1, int)  # an epoch and the order of its rows

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
        if self._order[0] != epoch:
            self._order = epoch, self._layout.order(derive_key(self._seed, "rows", epoch))
        row = self._layout.read(self._order[1](position), derive_key(self._seed, "shift", epoch))
        return row if self._separate else row.joined()

    def summary(self) -> dict[str, Any]:
        return {"documents": self.store.n_documents, "tokens": self.store.n_tokens, "rows_per_epoch": self.n_rows}

    def document_lengths(self, at_most: int) -> np.ndarray:
        return self.store.lengths()[:at_most]

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        return {"data_tokens": state["row"] * self.context, "data_epochs": state["row"] / self.n_rows}


class HeldOutRows:
    """Held-out text cut into rows in its own order, each token predicted at most once; the last row is padded."""

    def __init__(self, name: str, store: TokenStore, context: int, *, padding_id: int, separate: bool = True) -> None:
        if store.n_tokens < 2:
            raise UserError(f"data: the held-out set {name!r} has no text: give data.validation_path with some text.")
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
