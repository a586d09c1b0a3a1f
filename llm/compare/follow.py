"""A live view of runs: where each is, how fast, how long it will take, and whether anything still works on it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from llm.compare.discover import find
from llm.compare.records import Run, UnreadableRun, read_run
from llm.compare.tables import Table, as_text, number
from llm.loggers import readable
from llm.runlock import holder

QUIET_SECONDS = 600  # without a line of metrics, after which a run is suspected
HEAD = ["run", "seed", "state", "step", "loss", "val loss", "tokens/s", "left", "last line"]
SHORTEST_NAME = 16  # that a run's is cut to on a narrow terminal
CLEAR, HIDE_CURSOR, SHOW_CURSOR = "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"


@dataclass(frozen=True)
class Status:
    """A run as of one look. `line` is its row of the table; `state` tells whether something happened since the last."""

    name: str
    state: str
    line: list[str]


class Watch:
    """Looks at run folders again and again; a folder whose metrics did not change is not read anew."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.read: dict[Path, tuple[int, Run]] = {}

    def look(self, now: float) -> list[Status]:
        """The state of every run, running ones first, and of every job of a sweep that has none yet."""
        folders, told = find(self.paths)
        found = [self._status(folder, now) for folder in folders]
        absent = [job for job in told if Path(job.path).name not in {folder.name for folder in folders}]
        found += [Status(s.path, s.reason, [_tail(s.path), "", s.reason, *[""] * 6]) for s in absent]
        return sorted(found, key=lambda status: (not status.state.startswith("running"), status.name))

    def _status(self, folder: Path, now: float) -> Status:
        try:
            run, age = self._run(folder), now - _changed(folder) / 1e9
        except UnreadableRun as error:
            owner, alive = holder(folder)
            state = "starting" if owner and alive else f"unreadable: {error}"
            return Status(str(folder), state, [_tail(folder), "", state, *[""] * 6])
        state = state_of(run, age)
        latest = run.latest
        shown = [number(latest[name]) if name in latest else "" for name in ("loss", "val_loss")]
        speed = f"{run.speed:,.0f}" if run.speed else ""
        left = readable("eta_seconds", latest.get("eta_seconds", 0.0)) if state.startswith("running") else ""
        cells = [
            _tail(folder),
            str(run.pair[0]),
            state,
            f"{run.step:,}/{run.steps:,}",
            *shown,
            speed,
            left,
            f"{_ago(age)} ago",
        ]
        return Status(str(folder), state, cells)

    def _run(self, folder: Path) -> Run:
        changed = _changed(folder)
        if folder not in self.read or self.read[folder][0] != changed:
            self.read[folder] = (changed, read_run(folder))
        return self.read[folder][1]


def _changed(folder: Path) -> int:
    """When the last line of metrics was written, in nanoseconds; 0 where there is none."""
    try:
        return (folder / "metrics.jsonl").stat().st_mtime_ns
    except OSError:
        return 0


def state_of(run: Run, age: float) -> str:
    """finished, running, stopped, or died; `age` is the time since its last line of metrics, in seconds."""
    owner, alive = holder(run.path)
    if owner and alive:
        return "running" if age < QUIET_SECONDS else f"running? no line for {_ago(age)}"
    if run.finished:
        return "finished"
    return "stopped" if owner is None else f"died: {owner} is gone"


def follow(paths: Sequence[Path], *, every: float = 5.0, once: bool = False, stream: TextIO | None = None) -> int:
    """Show the runs below `paths` every so many seconds until Ctrl-C: redrawn on a terminal, elsewhere what changed."""
    stream = stream or sys.stdout
    watch = Watch(paths)
    before: dict[str, str] | None = None
    with _screen(stream):
        while True:
            found = watch.look(time.time())
            if stream.isatty():
                stream.write(CLEAR + _fitted(found))
            else:
                stream.write("".join(_news(found, before)))
            stream.flush()
            before = {status.name: status.state for status in found}
            if once:
                return 0
            try:
                time.sleep(every)
            except KeyboardInterrupt:
                return 0


def _news(found: Sequence[Status], before: dict[str, str] | None) -> Iterator[str]:
    """At first the whole table; later a line for each run that changed its state."""
    if before is None:
        yield _table(found) + "\n"
        return
    for status in found:
        if before.get(status.name) != status.state:
            yield "  ".join(cell for cell in status.line if cell) + "\n"


def _table(found: Sequence[Status]) -> str:
    counts: dict[str, int] = {}
    for status in found:
        word = status.state.partition(" ")[0].rstrip("?:,")
        counts[word] = counts.get(word, 0) + 1
    title = ", ".join(f"{n} {word}" for word, n in counts.items())
    return as_text(Table("follow", title or "no runs yet", HEAD, [status.line for status in found]))


def _fitted(found: Sequence[Status]) -> str:
    """The table cut to the terminal, so that redrawing leaves nothing behind: names first, they are the longest."""
    size = shutil.get_terminal_size()
    excess = max(map(len, _table(found).splitlines())) - size.columns
    room = max([SHORTEST_NAME, *(len(status.line[0]) for status in found)]) - max(0, excess)
    cut = [replace(status, line=[_cut(status.line[0], room), *status.line[1:]]) for status in found]
    lines = _table(cut).splitlines()[: size.lines - 1]
    return "\n".join(line[: size.columns] for line in lines) + "\n"


def _cut(name: str, room: int) -> str:
    room = max(SHORTEST_NAME, room)
    return name if len(name) <= room else f"{name[: room - 3]}..."


@contextmanager
def _screen(stream: TextIO) -> Iterator[None]:
    """Without a cursor on a terminal, and with it again afterwards."""
    if not stream.isatty():
        yield
        return
    stream.write(HIDE_CURSOR)
    try:
        yield
    finally:
        stream.write(SHOW_CURSOR)
        stream.flush()


def _tail(path: Path | str) -> str:
    return Path(path).name


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"
