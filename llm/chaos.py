"""Kill training over and over, and hold what comes out in the end against an undisturbed run, bit for bit::

    python -m llm.chaos --kills 100 [--out DIR] [--seed N] [--into FILE.md] [key=value ...]

Every attempt is a process of its own (a fork: the imports are paid once) that suffers a fault: it is killed by SIGKILL
at a random instant or at a chosen one, asked to stop by a signal, finds a full disk, or what a power cut may leave. The
next attempt is the same command again. When a run gets to its end it is compared, and the next one begins, until there
were enough kills. Faults are drawn like cards: none comes again before each came once.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llm import checkpoint, trainer
from llm.cli import command
from llm.compose import compose
from llm.config import TrainConfig
from llm.runs_equal import differences_of_runs
from llm.session import train
from llm.stopping import SIGNALS, Outcome
from llm.tokenizer import load_tokenizer

SMALL_RUN = [
    "mixer=hybrid_gdn_1to1", "model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16",
    "model.linear_head_dim=16", "model.parameters=30000", "data=local", "data.path=bundled:val.jsonl",
    "data.validation_path=bundled:val.jsonl", "data.validation_tokens=4000", "data.mode=stream", "context=64",
    "batch_tokens=256", "micro_batch=2", "steps=30", "log_every=3", "eval.every=5", "eval.max_rows=16",
    "checkpoint.every=4",
]  # fmt: skip

STOPS = (Outcome.PREEMPTED, Outcome.INTERRUPTED)
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"

# armed, in the process that is to suffer it, with dice, the run's folder and the seconds that an undisturbed run takes
Fault = Callable[[random.Random, Path, float], None]


def die() -> None:
    """SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk() -> None:
    """What a write raises there."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at_call(owner: object, name: str, most: int, happen: Callable[[], None] = die) -> Fault:
    """Something happens at one of the first `most` calls of a function."""

    def arm(dice: random.Random, run_dir: Path, seconds: float) -> None:
        original, left = getattr(owner, name), dice.randint(1, most)

        def counting(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                happen()
            return original(*args, **kwargs)

        setattr(owner, name, counting)

    return arm


def after_delay(number: signal.Signals) -> Fault:
    """A signal at any time of the run."""

    def arm(dice: random.Random, run_dir: Path, seconds: float) -> None:
        timer = threading.Timer(dice.uniform(0.0, seconds), os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    return arm


def damage(dice: random.Random, run_dir: Path, seconds: float) -> None:
    """A flipped bit in the newest checkpoint, if there is an older one."""
    checkpoints = checkpoint.Checkpoints(run_dir)
    if len(checkpoints.steps()) > 1:
        file = dice.choice(sorted(checkpoints.path(checkpoints.steps()[-1]).iterdir()))
        content = bytearray(file.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(content)


def tear(dice: random.Random, run_dir: Path, seconds: float) -> None:
    """Half a line at the end of metrics.jsonl, as a power cut leaves it."""
    if run_dir.exists():
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 12, "lo')


FAULTS: dict[str, Fault] = {
    "SIGKILL at a random instant": after_delay(signal.SIGKILL),
    "SIGKILL in a step": at_call(trainer.Trainer, "clip", 12),
    "SIGKILL in evaluation": at_call(trainer.Trainer, "_validate", 3),
    "SIGKILL while tensors are written": at_call(checkpoint, "_save_tensors", 9),
    "SIGKILL while files are hashed": at_call(checkpoint, "sha256", 20),
    "SIGKILL between renaming and pruning": at_call(checkpoint.Checkpoints, "prune", 3),
    "SIGKILL in pruning": at_call(checkpoint, "_discard", 2),
    "SIGTERM at a random instant": after_delay(signal.SIGTERM),
    "SIGUSR1 at a random instant": after_delay(signal.SIGUSR1),
    "SIGINT at a random instant": after_delay(signal.SIGINT),
    "disk full while tensors are written": at_call(checkpoint, "_save_tensors", 6, full_disk),
    "a bit flipped in the newest checkpoint": damage,
    "a torn last line of metrics": tear,
}
ENDINGS = {0, *(-number for number in (signal.SIGKILL, *SIGNALS.values()))} | {outcome.exit_code for outcome in STOPS}


@command
def main(words: list[str] | None = None) -> int:
    """The command line; exit code 1 when a run differs."""
    parser = argparse.ArgumentParser(prog="python -m llm.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, help="put the table between the chaos markers of this file")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    options = parser.parse_args(words)
    table, same = chaos(options.kills, options.out, random.Random(options.seed), options.overrides)
    print(table)
    if options.into:
        text = options.into.read_text()
        head, rest = text.split(BEGIN)
        options.into.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    return 0 if same else 1


def chaos(kills: int, out: Path, dice: random.Random, overrides: list[str]) -> tuple[str, bool]:
    """Disturb runs until `kills` attempts were cut short. Returns (Markdown table, whether all runs came out right)."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    whole = _config(out / "whole", overrides)
    load_tokenizer(whole.tokenizer.path)  # imports what every attempt would import anew
    began = time.monotonic()
    if _attempt(whole, out) != 0:
        raise RuntimeError(f"the undisturbed run failed: see {out}/log")
    seconds = time.monotonic() - began
    tally, faults = Tally(), _deal(dice)
    while tally.cut.total() < kills:
        run, suffered, code = _config(out / f"run{tally.runs}", overrides), [], None
        while code != 0:
            fault = next(faults) if tally.cut.total() < kills else None
            code = _attempt(run, out, fault, random.Random(dice.random()), seconds)
            if fault is None and code != 0:
                raise RuntimeError(f"the last attempt at {run.run_dir} failed: see {out}/log")
            suffered += [fault] if fault else []
            tally.cut[fault] += code != 0
        tally.finish(suffered, differences_of_runs(whole.run_dir, run.run_dir))
    return str(tally), not tally.wrong


@dataclass
class Tally:
    """How often each fault was tried and cut an attempt short, and in how many runs that came out wrong it was."""

    tried: Counter = field(default_factory=Counter)
    cut: Counter = field(default_factory=Counter)
    wrong: Counter = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    runs: int = 0

    def finish(self, suffered: list[str], differences: list[str]) -> None:
        """A run came to its end."""
        self.tried.update(suffered)
        if differences:
            self.wrong.update(set(suffered))
            self.found.append(f"run{self.runs}: {', '.join(differences)}")
        self.runs += 1

    def __str__(self) -> str:
        lines = ["| fault | tried | attempts cut short | outcome |", "| --- | ---: | ---: | --- |"]
        for name in FAULTS:
            outcome = f"in {self.wrong[name]} runs that DIFFER" if self.wrong[name] else "bitwise equal"
            lines.append(f"| {name} | {self.tried[name]} | {self.cut[name]} | {outcome if self.tried[name] else ''} |")
        lines += [f"| all | {self.tried.total()} | {self.cut.total()} | |", ""]
        verdict = "; ".join(self.found) or "all bitwise equal to the undisturbed run"
        return "\n".join(
            [*lines, f"{self.runs} runs came to their end: {verdict} (weights, optimizer, RNG, data, metrics)."]
        )


def _deal(dice: random.Random) -> Iterator[str]:
    """Faults without end, all of them in random order and then anew."""
    while True:
        yield from dice.sample(list(FAULTS), len(FAULTS))


def _config(run_dir: Path, overrides: list[str]) -> TrainConfig:
    return compose([*SMALL_RUN, f"run_dir={run_dir}", *overrides])


def _attempt(
    config: TrainConfig,
    out: Path,
    fault: str | None = None,
    dice: random.Random | None = None,
    seconds: float = 0.0,
) -> int:
    """Train in a process of its own that suffers `fault`. Its exit code: 0, or a reason to go on with the same command.

    RuntimeError where it ended in any other way.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            print(f"--- {time.ctime()} {fault}", file=sys.stderr)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # before training begins it just ends
            if fault:
                FAULTS[fault](dice, Path(config.run_dir), seconds)
            code = train(config)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in ENDINGS:
        raise RuntimeError(f"an attempt ended with {code} after {fault!r}: see {out}/log")
    return code


if __name__ == "__main__":
    sys.exit(main())
