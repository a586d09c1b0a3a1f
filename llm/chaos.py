"""Kill training over and over, and hold what comes out in the end against an undisturbed run, bit for bit::

    python -m llm.chaos --kills 100 [--out DIR] [--seed N] [--into FILE.md] [key=value ...]

Every attempt is a process of its own (a fork: the imports are paid once) that suffers a fault: it is killed by SIGKILL
at a random instant or at a chosen one, or is asked to stop by SIGTERM. The next attempt is the same command again. When
a run gets to its end it is compared, and the next one begins, until there were enough kills. Faults are drawn like
cards: none comes again before each came once.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from llm import checkpoint, trainer
from llm.cli import command
from llm.compose import compose
from llm.config import TrainConfig
from llm.runs_equal import differences_of_runs
from llm.session import train
from llm.stopping import Outcome
from llm.tokenizer import load_tokenizer

SMALL_RUN = [
    "mixer=hybrid_gdn_1to1", "model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16",
    "model.linear_head_dim=16", "model.parameters=30000", "data=local", "data.path=bundled:val.jsonl",
    "data.validation_path=bundled:val.jsonl", "data.validation_tokens=4000", "data.mode=stream", "context=64",
    "batch_tokens=256", "micro_batch=2", "steps=30", "log_every=3", "eval.every=5", "checkpoint.every=4",
]  # fmt: skip

BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"

Fault = Callable[[random.Random, float], None]  # armed with dice and the seconds that an undisturbed run takes


def at_call(owner: object, name: str, most: int) -> Fault:
    """SIGKILL at one of the first `most` calls of a function."""

    def arm(dice: random.Random, seconds: float) -> None:
        original, left = getattr(owner, name), dice.randint(1, most)

        def counting(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, counting)

    return arm


def after_delay(number: signal.Signals) -> Fault:
    """A signal at any time of the run."""

    def arm(dice: random.Random, seconds: float) -> None:
        timer = threading.Timer(dice.uniform(0.0, seconds), os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    return arm


FAULTS: dict[str, Fault] = {
    "SIGKILL at a random instant": after_delay(signal.SIGKILL),
    "SIGKILL in a step": at_call(trainer.Trainer, "clip", 12),
    "SIGKILL in evaluation": at_call(trainer.Trainer, "_validate", 3),
    "SIGKILL while tensors are written": at_call(checkpoint, "_save_tensors", 9),
    "SIGKILL while files are hashed": at_call(checkpoint, "sha256", 20),
    "SIGKILL between renaming and pruning": at_call(checkpoint.Checkpoints, "prune", 3),
    "SIGKILL in pruning": at_call(checkpoint, "_discard", 2),
    "SIGTERM at a random instant": after_delay(signal.SIGTERM),
}


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
    hit, missed, runs, wrong, faults = Counter(), Counter(), 0, [], _deal(dice)
    while sum(hit.values()) < kills:
        run = _config(out / f"run{runs}", overrides)
        while fault := next(faults) if sum(hit.values()) < kills else None:
            if _attempt(run, out, fault, random.Random(dice.random()), seconds) == 0:
                missed[fault] += 1  # the run was over before the fault came
                break
            hit[fault] += 1
        if fault is None and _attempt(run, out) != 0:
            raise RuntimeError(f"the last attempt at {run.run_dir} failed: see {out}/log")
        runs += 1
        wrong += [f"{run.run_dir}: {text}" for text in differences_of_runs(whole.run_dir, run.run_dir)]
    return _table(hit, missed, runs, wrong), not wrong


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
            if fault:
                FAULTS[fault](dice, seconds)
            code = train(config)
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL, -signal.SIGTERM, Outcome.PREEMPTED.exit_code):
        raise RuntimeError(f"an attempt ended with {code} after {fault!r}: see {out}/log")
    return code


def _table(hit: Counter, missed: Counter, runs: int, wrong: list[str]) -> str:
    lines = ["| fault | attempts cut short | came after the end |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {hit[name]} | {missed[name]} |" for name in FAULTS]
    lines += [f"| all | {sum(hit.values())} | {sum(missed.values())} |", ""]
    verdict = "all bitwise equal to the undisturbed run" if not wrong else "DIFFERENT: " + "; ".join(wrong)
    return "\n".join([*lines, f"{runs} runs came to their end: {verdict} (weights, optimizer, RNG, data, metrics)."])


if __name__ == "__main__":
    sys.exit(main())
