"""Batches of the rows that belong to one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from llm.data.batch import IGNORED, Batch
from llm.data.rows import HeldOut, Row, Rows, collate
from llm.data.workers import LaneReader, WorkerReader
from llm.errors import UserError


class RankRows:
    """The numbers of one rank's rows, a micro-batch at a time, without end."""

    def __init__(self, first: int, micro_batch: int, per_pass: int) -> None:
        self._first, self._micro_batch, self._per_pass = first, micro_batch, per_pass

    def __iter__(self) -> Iterator[list[int]]:
        for first in count(self._first, self._per_pass):
            yield list(range(first, first + self._micro_batch))


class Loader:
    """Endless iterator over the batches of one rank (see `llm.data`)."""

    def __init__(self, rows: Rows, numbers: RankRows, per_pass: int, state: dict[str, Any], workers: int) -> None:
        self._rows, self._numbers, self._per_pass = rows, iter(numbers), per_pass
        self._next_row: int = state["row"]
        self._lane_states: dict[str, Any] = dict(state["lanes"])
        known = dict(state["lanes"])
        self._reader = WorkerReader(rows, known, numbers, workers) if workers else LaneReader(rows, known)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        rows = [self._read(number) for number in next(self._numbers)]
        self._next_row += self._per_pass
        return collate(rows, self.state())

    def state(self) -> dict[str, Any]:
        """The position after the last batch, as far as this rank knows it."""
        return {"fingerprint": self._rows.fingerprint, "row": self._next_row, "lanes": dict(self._lane_states)}

    def close(self) -> None:
        """End the processes and let go of open files."""
        self._reader.close()

    def _read(self, number: int) -> Row:
        row, at = self._reader.read(number)
        if at is not None:
            lane, index = self._rows.place(number)
            self._lane_states[lane] = {"rows": index + 1, "at": at}
        return row


def batches(
    rows: Rows,
    *,
    micro_batch: int,
    rows_per_step: int,
    rank: int = 0,
    world_size: int = 1,
    state: dict[str, Any] | None = None,
    workers: int = 0,
) -> Loader:
    """The batches of rank `rank`, from the beginning or after the step at whose end `state` was taken.

    With `workers`, that many processes read and tokenise ahead. Raises UserError when rows_per_step is not a multiple
    of micro_batch * world_size, or `state` is of other data.
    """
    per_pass = micro_batch * world_size
    if rows_per_step % per_pass:
        raise UserError(
            f"batch_tokens / context = {rows_per_step} rows a step is not a multiple of micro_batch * devices = "
            f"{micro_batch} * {world_size}: change micro_batch or batch_tokens."
        )
    state = state or {"fingerprint": rows.fingerprint, "row": 0, "lanes": {}}
    if state["fingerprint"] != rows.fingerprint:
        raise UserError(
            f"data={rows.name}: the checkpoint's data are not these (their source, tokenizer, data.seed, context or "
            "packing changed since). Restore them, or start a new run from the weights with init_from."
        )
    numbers = RankRows(state["row"] + rank * micro_batch, micro_batch, per_pass)
    return Loader(rows, numbers, per_pass, state, workers)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The position of the data after a step, from every rank's `batch.state` at its end."""
    if len({(state["fingerprint"], state["row"]) for state in states}) != 1:
        raise ValueError("the states are of different steps or data")
    merged = dict(states[0], lanes={})
    for state in states:
        for name, lane in state["lanes"].items():
            known = merged["lanes"].get(name)
            if known is None or known["rows"] < lane["rows"]:
                merged["lanes"][name] = lane
    return merged


def validation_batches(
    rows: HeldOut, *, micro_batch: int, rank: int = 0, world_size: int = 1, max_rows: int | None = None
) -> Iterator[Batch]:
    """This rank's share of the held-out rows, the same number of batches on every rank, all of `micro_batch` rows.

    Together the ranks see every row once whatever the micro-batch; rows that only fill up count no target. With
    `max_rows`, that many rows spread evenly over the set, always the same ones.
    """
    count = len(rows) if max_rows is None else min(max_rows, len(rows))
    chosen = np.linspace(0, len(rows), count, endpoint=False).astype(int).tolist()
    per_pass = micro_batch * world_size
    for first in range(0, count, per_pass):
        mine = range(first + rank * micro_batch, first + (rank + 1) * micro_batch)
        yield collate([rows.read(chosen[i]) if i < count else _uncounted(rows.read(chosen[0])) for i in mine], {})


def _uncounted(row: Row) -> Row:
    """The row with no target counted."""
    return replace(row, labels=np.full(len(row.ids) - 1, IGNORED))
