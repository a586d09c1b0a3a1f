"""What a checkpoint costs that is written while training goes on, as a share of an optimizer step::

    python scripts/bench_checkpoint.py [mixer=gdn] [model=340m] [key=value ...] [--saves 2] [--json FILE]

Steps of half a million random tokens are timed alone; then a checkpoint is begun and steps go on until it is durable.
Its cost is the time that those took beyond as many undisturbed ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from llm.bench.split import synchronize
from llm.bench.steps import bench_config, build_trainer, run_steps
from llm.cli import command
from llm.trainer import Trainer

CONTEXT, TOKENS, MICRO_BATCH = 4096, 524_288, 8


@command
def main(words: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("::")[0])
    parser.add_argument("--saves", type=int, default=2, help="checkpoints written one after the other")
    parser.add_argument("--steps", type=int, default=2, help="undisturbed steps to compare with")
    parser.add_argument("--out", type=Path, help="folder for the checkpoints; default: a temporary one")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens a step")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    options = parser.parse_args(words)
    config = bench_config(
        [f"micro_batch={MICRO_BATCH}", *options.overrides], context=options.context, tokens=options.tokens
    )
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        trainer = build_trainer(config, folder, packed=True)
        trainer.loggers.loggers.clear()  # there is nothing to log
        trainer.resume()
        with closing(trainer.batches):
            figures = measure(trainer, options.steps, options.saves)
        trainer.run.close()
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


def measure(trainer: Trainer, steps: int, saves: int) -> dict[str, object]:
    """Seconds of a step, and of each checkpoint: what it held up, what it took to be written, its cost in steps."""
    run_steps(trainer, 1)  # compiles
    step = run_steps(trainer, steps) / steps
    return {"step_seconds": step, "saves": [_save(trainer, step) for _ in range(saves)]}


def _save(trainer: Trainer, step: float) -> dict[str, float]:
    synchronize(trainer.device)
    began, done = time.perf_counter(), 0
    trainer.save()
    held_up = time.perf_counter() - began
    while trainer.saver.busy or not done:
        run_steps(trainer, 1)
        done += 1
    total = time.perf_counter() - began
    if trainer.saver.saved_step is None:
        raise RuntimeError("the checkpoint was not written")
    size = sum(p.stat().st_size for p in trainer.run.checkpoints.path(trainer.saver.saved_step).iterdir())
    return {
        "gib": size / 2**30,
        "held_up_seconds": held_up,
        "steps_meanwhile": done,
        "seconds_of_them": total,
        "cost_in_steps": (total - done * step) / step,
    }


if __name__ == "__main__":
    sys.exit(main())
