"""Sinks of metrics: the console, metrics.jsonl, Weights & Biases.

A logger has `start`, `log`, `flush` and `close` (see `Logger`); `Loggers` fans out to several and sees to it that none
of them can stop training. A line of metrics is a step and a flat mapping of names to numbers.
"""

from __future__ import annotations

import errno
import json
import netrc
import os
import secrets
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlparse

from tqdm import tqdm

from llm.durable import replace_file
from llm.identity import SWEEP_VARIABLE

Values = Mapping[str, float]

LABELS = {"tokens_per_second": "tok/s", "eta_seconds": "eta", "memory_gib": "GiB", "val_perplexity": "val_ppl"}
GIVE_UP_AFTER = 5  # failures in a row


class Logger:
    """What a sink of metrics is; the methods do nothing here."""

    def start(self, *, run_dir: Path, config: Mapping[str, Any], step: int, steps: int) -> None:
        """A run begins, or goes on after `step` of `steps`: lines beyond `step` that an earlier part wrote are void."""

    def advance(self, step: int) -> None:
        """An optimizer step is done; called for each."""

    def log(self, step: int, values: Values) -> None:
        """Take a line of metrics."""

    def rewind(self, step: int) -> None:
        """Training goes back to `step`: lines beyond it are void."""

    def flush(self) -> None:
        """Make durable what was logged: a checkpoint is about to be written."""

    def close(self) -> None:
        """The run stops here."""


class Loggers(Logger):
    """Several loggers as one. What a logger raises is reported on stderr; one that fails again and again is dropped."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self.loggers = list(loggers)
        self.failures: dict[Logger, int] = {}
        self.started = False

    def start(self, **run: Any) -> None:
        self.started = True
        self._each(lambda logger: logger.start(**run))

    def advance(self, step: int) -> None:
        self._each(lambda logger: logger.advance(step))

    def log(self, step: int, values: Values) -> None:
        self._each(lambda logger: logger.log(step, values))

    def rewind(self, step: int) -> None:
        self._each(lambda logger: logger.rewind(step))

    def flush(self) -> None:
        self._each(lambda logger: logger.flush())

    def close(self) -> None:
        if self.started:
            self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.loggers):
            try:
                call(logger)
                self.failures.pop(logger, None)
            except Exception:  # whatever a logger's library raises, the run goes on
                self._failed(logger)

    def _failed(self, logger: Logger) -> None:
        self.failures[logger] = self.failures.get(logger, 0) + 1
        name, reason = type(logger).__name__, traceback.format_exc(limit=0).strip().splitlines()[-1]
        print(f"warning: {name} failed ({reason}); training goes on", file=sys.stderr, flush=True)
        if self.failures[logger] >= GIVE_UP_AFTER and not isinstance(logger, JsonlLogger):
            print(f"warning: {name} failed {GIVE_UP_AFTER} times in a row and is left out", file=sys.stderr, flush=True)
            self.loggers.remove(logger)


class JsonlLogger(Logger):
    """metrics.jsonl: one JSON object a line, in the order of the steps, each step once."""

    def start(self, *, run_dir: Path, config: Mapping[str, Any], step: int, steps: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.pending: list[str] = []  # lines that the disk did not take yet
        if self.path.exists():
            truncate_metrics(self.path, step)

    def log(self, step: int, values: Values) -> None:
        self.pending.append(json.dumps({"step": step, **values}) + "\n")
        self._write()

    def rewind(self, step: int) -> None:
        self._write(sync=True)
        truncate_metrics(self.path, step)

    def flush(self) -> None:
        self._write(sync=True)

    def close(self) -> None:
        self._write(sync=True)

    def _write(self, *, sync: bool = False) -> None:
        with self.path.open("ab", buffering=0) as file:
            self._append(file, "".join(self.pending).encode())
            self.pending.clear()
            if sync:
                os.fsync(file.fileno())

    def _append(self, file: FileIO, content: bytes) -> None:
        """All of it or nothing, so that lines which a full disk refuses can be written later."""
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, "no space left for", str(self.path))
        except OSError:
            file.truncate(size)
            raise


def truncate_metrics(path: Path, step: int) -> None:
    """Drop lines beyond `step`, and torn ones, from a metrics.jsonl: atomically, and only where there are any."""
    text = path.read_bytes().decode(errors="replace")
    kept = [line for line in text.splitlines() if _step_of(line) is not None and _step_of(line) <= step]
    repaired = "".join(line + "\n" for line in kept)
    if repaired != text:
        replace_file(path, repaired.encode())


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


class ConsoleLogger(Logger):
    """A progress bar on a terminal, plain lines in a pipe or file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.bar: tqdm | None = None

    def start(self, *, run_dir: Path, config: Mapping[str, Any], step: int, steps: int) -> None:
        self.steps = steps
        if self.stream.isatty():
            self.bar = tqdm(total=steps, initial=step, unit="step", file=self.stream, dynamic_ncols=True)

    def advance(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(step - self.bar.n)

    def rewind(self, step: int) -> None:
        self.advance(step)

    def log(self, step: int, values: Values) -> None:
        shown = {name: value for name, value in values.items() if "/" not in name}  # probes by layer are too many
        texts = (f"{LABELS.get(name, name)} {readable(name, value)}" for name, value in shown.items())
        line = f"step {step}/{self.steps}  " + "  ".join(texts)
        if self.bar is not None:
            self.bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def readable(name: str, value: float) -> str:
    """A metric as people write it: 1.5e-04, 3:25:00, 137k, 41.2%."""
    if name == "eta_seconds":
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    if name == "mfu":
        return f"{value:.1%}"
    if name == "lr":
        return f"{value:.2e}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return str(value) if isinstance(value, int) else f"{value:.4f}".rstrip("0").rstrip(".")


class WandbLogger(Logger):
    """Weights & Biases. Without a login (or with WANDB_MODE set) it writes offline runs, to be sent by `wandb sync`.

    A resumed run goes on under the id that `wandb_id` in the run's folder holds. Jobs of a sweep are one `group`, by
    the sweep's name, unless another is given.
    """

    def __init__(
        self, project: str = "mixlab", entity: str | None = None, name: str | None = None, group: str | None = None
    ) -> None:
        self.project, self.entity, self.name = project, entity, name
        self.group = group or os.environ.get(SWEEP_VARIABLE)

    def start(self, *, run_dir: Path, config: Mapping[str, Any], step: int, steps: int) -> None:
        import wandb  # here, since nobody else needs it

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            replace_file(id_file, secrets.token_hex(4).encode())
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_login() else "offline")
        self.run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run_dir.name,
            group=self.group,
            id=id_file.read_text(),
            resume="allow",
            mode=mode,
            dir=run_dir,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        if mode in ("offline", "dryrun"):
            runs = f"{shlex.quote(str(run_dir / 'wandb'))}/offline-run-*"
            tqdm.write(f"wandb is offline: it writes to {run_dir / 'wandb'}; send it: wandb sync {runs}", sys.stderr)
        # wandb's own counter may not go back, but a resumed run does, by up to a checkpoint's interval
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


def _has_wandb_login() -> bool:
    """Does this machine have a key for wandb's server? Where it has not, wandb would prompt for one or fail."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
