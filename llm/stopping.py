"""Why a run stops before its last step, and how it says so: signals, the wall clock, exit codes."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType, TracebackType

from llm.errors import UserError

SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGINT": signal.SIGINT}  # Slurm warns with USR1


class Outcome(IntEnum):
    """How a run, or a part of one, ended. Of several reasons on several ranks the greatest counts."""

    RUNNING = 0
    FINISHED = 1
    STOPPED = 2  # stop_after
    OUT_OF_TIME = 3  # max_wall_time
    PREEMPTED = 4  # SIGTERM, SIGUSR1
    INTERRUPTED = 5  # SIGINT
    UNSAVED = 6  # it ended, but the last checkpoint could not be written

    @property
    def exit_code(self) -> int:
        """0 done; 75 (EX_TEMPFAIL) start the same command again to go on; 130 stopped by a person; 74 (EX_IOERR)."""
        return {self.OUT_OF_TIME: 75, self.PREEMPTED: 75, self.INTERRUPTED: 130, self.UNSAVED: 74}.get(self, 0)


class StopNow(BaseException):
    """A signal came where nothing would be lost. Not an Exception, so that nothing takes it for one and tries again."""


class StopSignals:
    """Within it, a signal sets `outcome` for the next step boundary instead of ending the process.

    The handlers are put back at the first SIGINT, so that a second one stops at once. It may be entered again inside.
    """

    def __init__(self) -> None:
        self.outcome = Outcome.RUNNING
        self._previous: dict[int, object] = {}
        self._entered, self._at_once = 0, False

    def __enter__(self) -> StopSignals:
        self._entered += 1
        if self._entered == 1:
            self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS.values()}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered -= 1
        if self._entered == 0:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it, a signal does not wait for a step boundary: `StopNow` is raised, also for one that came before.

        For what may take long and leaves nothing half done: getting ready, waiting for data.
        """
        self._at_once = True
        try:
            if self.outcome is not Outcome.RUNNING:
                raise StopNow
            yield
        finally:
            self._at_once = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        interrupted = number == signal.SIGINT
        self.outcome = max(self.outcome, Outcome.INTERRUPTED if interrupted else Outcome.PREEMPTED)
        if interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._at_once:
            self._at_once = False
            raise StopNow


class WallTime:
    """Says when to stop so that the last step and the save still fit into `max_wall_time`, counted from its making."""

    def __init__(self, max_wall_time: str | None, now: Callable[[], float] = time.monotonic) -> None:
        self.limit = None if max_wall_time is None else parse_duration("max_wall_time", max_wall_time)
        self.now, self.started, self.longest = now, now(), 0.0

    def saw(self, seconds: float) -> None:
        """A step, an evaluation or a save took this long."""
        self.longest = max(self.longest, seconds)

    def over(self) -> bool:
        """Is there no time for two more things as long as the longest so far, and a twentieth of the limit?"""
        if self.limit is None:
            return False
        return self.now() - self.started + 2 * self.longest + self.limit / 20 > self.limit


def parse_duration(key: str, text: str) -> float:
    """Seconds of '3600', '90m', '11h30m' or '1d2h'. UserError otherwise."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or parts is None:
        raise UserError(f"{key}={text} is no duration: give seconds, or for instance 90m, 11h30m or 1d2h.")
    return float(sum(int(n or 0) * unit for n, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True)))
