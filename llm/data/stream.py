"""Rows from shards that are tokenised as they are needed, in constant memory, with a position of a few integers.

The shards are cut into units (a shard, or a part of one where shards are few). An epoch is a seeded permutation of all
units; the epochs follow each other in one endless list, of which stream v of V reads the units v, v + V, v + 2V, ...
Row i of the logical sequence is row i // V of stream i % V. Within a unit the blocks come in a seeded order, and so do
the documents of each group: no sliding buffer, so any position can be named by integers and sought.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, NamedTuple

import numpy as np

from llm.data.encode import Encoder
from llm.data.order import derive_key, digest, permutation
from llm.data.packing import Span, assemble, pack_best_fit
from llm.data.rows import Lane, Place, Row, starts_within
from llm.data.shards import Shard
from llm.data.split import is_held_out, nothing_left
from llm.errors import UserError

log = logging.getLogger(__name__)

UNITS_PER_STREAM = 4  # more units than streams, so that an epoch gives each stream about the same amount of text
WINDOW_ROWS = 128  # rows packed together: more pad less (about 1 / WINDOW_ROWS), but are tokenised again on resuming
SEQUENTIAL_PARTS = 8  # parts of a shard that can only be read through: each part reads all of it, parses its own share


class Position(NamedTuple):
    """A document in a stream: unit of the endless list, group of the unit, document of the group."""

    unit: int
    group: int = 0
    document: int = 0


@dataclass
class Corpus:
    """What streams share: the shards, their cut into units, and how documents become tokens."""

    shards: list[Shard]
    encoder: Encoder
    seed: int
    held_out: float = 0.0
    skip_unreadable: bool = False
    max_streams: int = 64
    units: list[tuple[int, int, int]] = field(init=False)  # shard, part, parts
    n_streams: int = field(init=False)
    _order: tuple[int, list[int]] = field(init=False, default=(-1, []))  # an epoch and its permutation of the units

    def __post_init__(self) -> None:
        wanted = -(-UNITS_PER_STREAM * self.max_streams // len(self.shards))
        parts = [self._parts(shard, wanted) for shard in self.shards]
        self.units = [(shard, part, n) for shard, n in enumerate(parts) for part in range(n)]
        self.n_streams = min(self.max_streams, max(1, len(self.units) // UNITS_PER_STREAM))

    def documents(self, stream: int, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """The tokens of the stream's documents from `start` on, endlessly, each with its position."""
        fruitless = 0
        for unit in count(start.unit, self.n_streams):
            found = False
            for position, tokens in self._documents_of_unit(unit, start if unit == start.unit else Position(unit)):
                found = True
                yield position, tokens
            fruitless = 0 if found else fruitless + 1
            if fruitless > len(self.units):
                raise nothing_left(self.shards[0].name, self.shards, self.held_out)

    def _documents_of_unit(self, unit: int, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        epoch, ordinal = divmod(unit, len(self.units))
        shard, part, parts = self.units[self._unit_order(epoch)[ordinal]]
        key = derive_key(self.seed, "blocks", epoch, shard)
        groups = self.shards[shard].groups(key=key, part=part, parts=parts, skip=start.group)
        try:
            for group, texts in enumerate(groups, start.group):
                order = permutation(len(texts), derive_key(self.seed, "documents", epoch, shard, part, group))
                first = start.document if group == start.group else 0
                chosen = [(d, texts[order[d]]) for d in range(first, len(texts))]
                kept = [(d, text) for d, text in chosen if not is_held_out(text, self.held_out)]
                for (d, _), tokens in zip(kept, self.encoder.stream(text for _, text in kept), strict=True):
                    yield Position(unit, group, d), tokens
        except UserError as error:
            if not self.skip_unreadable:
                raise
            log.warning("left out (data.unreadable=skip): %s", error)

    def _unit_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            self._order = epoch, permutation(len(self.units), derive_key(self.seed, "units", epoch))
        return self._order[1]

    def _parts(self, shard: Shard, wanted: int) -> int:
        """How many units the shard makes."""
        if wanted <= 1:
            return 1
        try:
            return min(wanted, shard.n_blocks() or SEQUENTIAL_PARTS)
        except UserError:
            if not self.skip_unreadable:
                raise
            return 1


class CutLane:
    """Documents laid end to end and cut into rows. The position is a document and a token in it."""

    def __init__(self, corpus: Corpus, stream: int, context: int, state: list[int] | None) -> None:
        *position, self._offset = state or [stream, 0, 0, 0]
        self._start = Position(*position)
        self._documents = corpus.documents(stream, self._start)
        self._context = context
        self._waiting: deque[tuple[Position, np.ndarray]] = deque()  # documents not yet used up
        self._available = -self._offset  # their tokens, less those of the first document that are used up
        self._next = 0

    def read_next(self) -> Row:
        """The next row; the one after begins `context` tokens further on."""
        while self._available < self._context + 1:
            document = next(self._documents)
            self._waiting.append(document)
            self._available += len(document[1])
        taken, first, at = [], [], -self._offset
        for _, tokens in self._waiting:
            if at > self._context:
                break
            taken.append(tokens[max(0, -at) : self._context + 1 - at])
            first.append(at)
            at += len(tokens)
        self._advance()
        begins = np.array([start for start in first if start > 0], dtype=np.int64)
        return Row(np.concatenate(taken), starts_within(begins, self._context + 1))

    def state(self) -> list[int]:
        """Unit, group, document, token of the next row's first token."""
        position = self._waiting[0][0] if self._waiting else self._start
        return [*position, self._offset]

    def _advance(self) -> None:
        self._offset += self._context
        self._available -= self._context
        while self._waiting and self._offset >= len(self._waiting[0][1]):
            self._offset -= len(self._waiting.popleft()[1])


class FitLane:
    """Documents of a window of the stream, packed best fit. The position is the window's first document and a row."""

    def __init__(self, corpus: Corpus, stream: int, context: int, state: list[int] | None) -> None:
        *position, self._done = state or [stream, 0, 0, 0]
        self._documents = corpus.documents(stream, Position(*position))
        self._window_start = Position(*position)
        self._context, self._padding_id = context, corpus.encoder.eos_id
        self._window: list[np.ndarray] = []
        self._bins: list[list[Span]] = []
        self._ahead: tuple[Position, np.ndarray] | None = None

    def read_next(self) -> Row:
        """The next row."""
        if not self._bins:
            self._fill()
        if self._done == len(self._bins):
            self._fill()
            self._done = 0
        pieces = self._bins[self._done]
        self._done += 1
        parts = [self._window[piece.document][piece.start : piece.end] for piece in pieces]
        return assemble(parts, self._context, self._padding_id)

    def state(self) -> list[int]:
        """The window's unit, group, document, and the rows of it that were read."""
        return [*self._window_start, self._done]

    def _fill(self) -> None:
        """Read and pack the next window: whole documents of at least WINDOW_ROWS rows of tokens."""
        first = self._ahead or next(self._documents)
        self._window_start, self._window = first[0], [first[1]]
        total = len(first[1])
        while total < WINDOW_ROWS * (self._context + 1):
            _, tokens = next(self._documents)
            self._window.append(tokens)
            total += len(tokens)
        self._ahead = next(self._documents)
        self._bins = pack_best_fit([len(tokens) for tokens in self._window], self._context, derive_key(*first[0]))


class StreamLane:
    """A stream behind the interface of lanes: rows that belong to other ranks are passed over."""

    def __init__(self, rows: CutLane | FitLane, index: int, separate: bool) -> None:
        self._rows, self._index, self._separate = rows, index, separate

    def read(self, index: int) -> Row:
        while self._index <= index:
            row = self._rows.read_next()
            self._index += 1
        return row if self._separate else row.joined()

    def state(self) -> list[int]:
        return self._rows.state()


class StreamedRows:
    """The endless rows of a corpus that is read as it is needed."""

    n_rows = None  # tokens are counted as they come

    def __init__(self, name: str, corpus: Corpus, context: int, *, packing: str, separate: bool, identity: str) -> None:
        self.name, self.context, self.corpus = name, context, corpus
        self._packing, self._separate = packing, separate
        settings = [corpus.encoder.fingerprint, corpus.seed, corpus.held_out, corpus.max_streams]
        next(corpus.documents(0, Position(0)))  # a mistake shows now, not when training has begun
        self.fingerprint = digest("stream", identity, *settings, context, packing, separate)

    def place(self, row: int) -> Place:
        index, stream = divmod(row, self.corpus.n_streams)
        return Place(str(stream), index)

    def lanes(self) -> list[str]:
        return [str(stream) for stream in range(self.corpus.n_streams)]

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> Lane:
        kind = {"cut": CutLane, "fit": FitLane}[self._packing]
        return StreamLane(kind(self.corpus, int(lane), self.context, state), index, self._separate)

    def summary(self) -> dict[str, Any]:
        corpus = self.corpus
        return {"files": len(corpus.shards), "units": len(corpus.units), "streams": corpus.n_streams}

    def document_lengths(self, at_most: int) -> np.ndarray:
        streams = [self.corpus.documents(stream, Position(stream)) for stream in range(self.corpus.n_streams)]
        return np.array([len(next(documents)[1]) for _, documents in zip(range(at_most), cycle(streams))])

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        """Epochs are counted in whole units that were read to their end."""
        corpus = self.corpus
        done = sum((lane["at"][0] - int(stream)) // corpus.n_streams for stream, lane in state["lanes"].items())
        return {"data_tokens": state["row"] * self.context, "data_epochs": done / len(corpus.units)}
