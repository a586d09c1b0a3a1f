"""Processes that read and tokenise rows ahead of need. The rows and their order are those without processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from llm.data.rows import Lane, Row, Rows

ROWS_AHEAD = 64  # rows that a process may have ready
PATIENCE = 5.0  # seconds between looks at whether the other side still lives


class Delivery(NamedTuple):
    """A row and the state of its lane after it (None: a lane without state)."""

    row: Row
    at: Any


class LaneReader:
    """Reads rows by their number, in growing order, each lane from its known state on."""

    def __init__(self, rows: Rows, lane_states: dict[str, Any]) -> None:
        self._rows, self._lane_states = rows, lane_states
        self._open: dict[str, Lane] = {}

    def read(self, number: int) -> Delivery:
        """Row `number` of the global sequence."""
        name, index = self._rows.place(number)
        if name not in self._open:
            known = self._lane_states.get(name)
            start = (known["rows"], known["at"]) if known else (0, None)
            self._open[name] = self._rows.open_lane(name, *start)
        lane = self._open[name]
        return Delivery(lane.read(index), lane.state())

    def close(self) -> None:
        """Let go of open files."""
        self._open.clear()


class Sharing:
    """Which process reads a lane: the lanes are dealt out in the order in which this rank's rows first need them."""

    def __init__(self, rows: Rows, n_workers: int) -> None:
        self._rows, self._n_workers = rows, n_workers
        self._owner: dict[str, int] = {}

    def owner(self, number: int) -> int:
        """The process that reads row `number`; ask for the rank's rows in order."""
        return self._owner.setdefault(self._rows.place(number).lane, len(self._owner) % self._n_workers)


class WorkerReader:
    """`LaneReader` with the work done by processes that run ahead along this rank's rows."""

    def __init__(self, rows: Rows, lane_states: dict[str, Any], numbers: Iterable[list[int]], n_workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["llm.data.workers"])
        self._sharing = Sharing(rows, n_workers)
        self._queues = [context.Queue(ROWS_AHEAD) for _ in range(n_workers)]
        self._processes = [
            context.Process(target=_work, args=(rows, lane_states, numbers, n_workers, index, ready), daemon=True)
            for index, ready in enumerate(self._queues)
        ]
        for process in self._processes:
            process.start()
        # before multiprocessing's own clean-up, which sends the SIGTERM that the processes ignore, and waits
        self.close = Finalize(self, _end, args=(self._processes, self._queues), exitpriority=100)

    def read(self, number: int) -> Delivery:
        """Row `number`; raises what reading it raised in the process."""
        index = self._sharing.owner(number)
        while True:
            try:
                found = self._queues[index].get(timeout=PATIENCE)
            except queue.Empty:
                if self._processes[index].is_alive():
                    continue
                code = self._processes[index].exitcode
                raise RuntimeError(
                    f"data worker {index} ended with exit code {code} (killed? out of memory?)"
                ) from None
            if isinstance(found, BaseException):
                raise found
            return found


def _end(processes: list[Any], queues: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for ready in queues:
        ready.close()


def _work(
    rows: Rows, lane_states: dict[str, Any], numbers: Iterable[list[int]], n_workers: int, index: int, ready: Any
) -> None:
    """A process: deliver the rows of the lanes that are its own, in order, until the trainer ends it."""
    # a scheduler's signal goes to all processes: the trainer still has to finish its step and save
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: the processes are the parallelism
    reader, sharing = LaneReader(rows, lane_states), Sharing(rows, n_workers)
    try:
        for number in (number for batch in numbers for number in batch):
            if sharing.owner(number) == index and not _put(ready, reader.read(number)):
                return
    except Exception as error:
        _put(ready, error)


def _put(ready: Any, item: Any) -> bool:
    """Wait for room and put the item; False when the trainer is gone."""
    while True:
        try:
            ready.put(item, timeout=PATIENCE)
            return True
        except queue.Full:
            if not multiprocessing.parent_process().is_alive():
                return False
