"""Batches of the rows that belong to one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llm.data.batch import Batch
from llm.data.rows import Lane, Row, Rows, collate
from llm.data.stored import HeldOutRows
from llm.errors import UserError


def rows_of_rank(
    start: int, *, micro_batch: int, rows_per_step: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """The numbers of this rank's rows, a micro-batch at a time, from the step that begins at row `start`."""
    per_pass = micro_batch * world_size
    if rows_per_step % per_pass:
        raise UserError(
            f"batch_tokens / context = {rows_per_step} rows a step is not a multiple of micro_batch * devices = "
            f"{micro_batch} * {world_size}: change micro_batch or batch_tokens."
        )
    first = start + rank * micro_batch
    while True:
        yield list(range(first, first + micro_batch))
        first += per_pass


class Loader:
    """Endless iterator over the batches of one rank (see `llm.data`)."""

    def __init__(self, rows: Rows, numbers: Iterator[list[int]], per_pass: int, state: dict[str, Any]) -> None:
        self._rows, self._numbers, self._per_pass = rows, numbers, per_pass
        self._next_row: int = state["row"]
        self._lane_states: dict[str, Any] = dict(state["lanes"])
        self._open: dict[str, Lane] = {}

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
        """Let go of open files."""
        self._open.clear()

    def _read(self, number: int) -> Row:
        name, index = self._rows.place(number)
        if name not in self._open:
            known = self._lane_states.get(name)
            start = (known["rows"], known["at"]) if known else (0, None)
            self._open[name] = self._rows.open_lane(name, *start)
        lane = self._open[name]
        row = lane.read(index)
        at = lane.state()
        if at is not None:
            self._lane_states[name] = {"rows": index + 1, "at": at}
        return row


def batches(
    rows: Rows,
    *,
    micro_batch: int,
    rows_per_step: int,
    rank: int = 0,
    world_size: int = 1,
    state: dict[str, Any] | None = None,
) -> Loader:
    """The batches of rank `rank`, from the beginning or after the step at whose end `state` was taken.

    Raises UserError when rows_per_step is not a multiple of micro_batch * world_size, or `state` is of other data.
    """
    state = state or {"fingerprint": rows.fingerprint, "row": 0, "lanes": {}}
    if state["fingerprint"] != rows.fingerprint:
        raise UserError(
            f"data={rows.name}: the checkpoint's data are not these (their source, tokenizer, data.seed, context or "
            "packing changed since). Restore them, or start a new run from the weights with init_from."
        )
    numbers = rows_of_rank(
        state["row"], micro_batch=micro_batch, rows_per_step=rows_per_step, rank=rank, world_size=world_size
    )
    return Loader(rows, numbers, micro_batch * world_size, state)


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
    rows: HeldOutRows, *, micro_batch: int, rank: int = 0, world_size: int = 1, max_rows: int | None = None
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
    return replace(row, counted=np.zeros(len(row.ids) - 1, dtype=bool))
