"""``-m``: every combination of comma-separated values, each job in a process tree of its own."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from llm.cli import INTERRUPTED
from llm.compose import compose
from llm.errors import UserError
from llm.identity import default_run_dir
from llm.layout import ratio_warning
from llm.stopping import SIGNALS, Outcome

REQUEUE = Outcome.PREEMPTED.exit_code
OUTCOMES = {0: "done", REQUEUE: "stopped", INTERRUPTED: "stopped"}


def jobs(words: Sequence[str]) -> list[list[str]]:
    """The command-line words of every job: the product of the values of words such as ``seed=1,2``."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise UserError(f"cannot read the command line: {str(error).splitlines()[0]}") from error
    choices = []
    for word, override in zip(words, parsed, strict=True):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([word])
    return [list(combination) for combination in itertools.product(*choices)]


def sweep(words: Sequence[str]) -> int:
    """Train every job in turn; one that fails leaves the others alone. Returns the exit code: 1 if any failed.

    A signal goes to the job that runs, which saves; the sweep then ends with the exit code of such a job.
    """
    planned = jobs(words)
    configs = [compose(job) for job in planned]  # mistakes surface before any training
    folders = [config.run_dir or str(default_run_dir(config)) for config in configs]
    _refuse_shared_folders(planned, folders)
    for warning in filter(None, map(ratio_warning, configs)):
        print(f"warning: {warning}", file=sys.stderr)
    results: list[tuple[str, int, float]] = []
    with _Relay() as relay:
        for i, (job, folder) in enumerate(zip(planned, folders, strict=True)):
            if relay.received is not None:
                break
            print(f"[{i + 1}/{len(planned)}] {' '.join(job)} -> {folder}", flush=True)
            begin = time.monotonic()
            code = relay.run([sys.executable, "-m", "llm.train", *job])
            results.append((folder, code, time.monotonic() - begin))
    for folder, code, seconds in results:
        print(f"{OUTCOMES.get(code, 'failed'):<8} exit code {code:3d}  {seconds:7.0f} s  {folder}")
    if relay.received is not None:
        print(f"stopped with {len(planned) - len(results)} jobs not begun; the same command goes on from here")
        return INTERRUPTED if relay.received == signal.SIGINT else REQUEUE
    return int(any(code for _, code, _ in results))


def _refuse_shared_folders(planned: list[list[str]], folders: list[str]) -> None:
    for i, folder in enumerate(folders):
        if folder in folders[:i]:
            first = " ".join(planned[folders.index(folder)])
            raise UserError(
                f"run_dir={folder}: the jobs '{first}' and '{' '.join(planned[i])}' would share it. Sweep over "
                "settings that make different runs (micro_batch, for one, does not), and leave run_dir to its default."
            )


class _Relay:
    """Hands signals on to the job that runs, so that it can save, and remembers that one came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.job: subprocess.Popen | None = None

    def __enter__(self) -> _Relay:
        self.previous = {number: signal.signal(number, self._receive) for number in SIGNALS.values()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def run(self, command: list[str]) -> int:
        """The exit code of the command, which is its own process group: a terminal's Ctrl-C comes through us alone."""
        self.job = subprocess.Popen(command, process_group=0)
        return self.job.wait()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.job is not None and self.job.poll() is None:
            self.job.send_signal(number)
