"""Run a part of a run again, and say whether it gives what was recorded::

    python -m llm.replay RUN --step N

It goes from the newest checkpoint before step N (or from the start) to the first step from N on that has a line in
metrics.jsonl, in a temporary folder: RUN is only read.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

from llm.checkpoint import Checkpoints
from llm.cli import command
from llm.config import TrainConfig
from llm.errors import UserError
from llm.runfolder import read_config
from llm.runs_equal import metrics_of


@command
def main(words: list[str] | None = None) -> int:
    """The command line; exit code 0 when the recorded lines are met exactly, else 1."""
    parser = argparse.ArgumentParser(prog="python -m llm.replay", description=__doc__.split("::")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, required=True, help="step whose recorded loss is to be met")
    options = parser.parse_args(words)
    differing, target = replay(options.run, options.step)
    if differing:
        print(f"replay of {options.run} up to step {target} DIFFERS:", *differing, sep="\n  ")
    else:
        print(f"replay of {options.run} up to step {target} meets the recorded metrics exactly")
    return int(bool(differing))


def replay(run: Path, step: int) -> tuple[list[str], int]:
    """(what differs from the recorded lines, last step replayed). UserError where RUN has no such step."""
    from llm.session import train

    recorded = {line["step"]: line for line in metrics_of(run)}
    later = [s for s in recorded if s >= step]
    if step < 1 or not later:
        raise UserError(f"--step {step}: {run} has recorded steps 1 to {max(recorded, default=0)}.")
    target = min(later)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        again = Path(folder) / "run"
        start = _copy_checkpoint_before(step, run, again)
        train(_replay_config(read_config(run), again, target))
        lines = metrics_of(again)
    compared = [line for line in lines if line["step"] > start and line["step"] in recorded]
    return [text for line in compared for text in _differences(recorded[line["step"]], line)], target


def _copy_checkpoint_before(step: int, run: Path, again: Path) -> int:
    """Give the new folder the newest checkpoint before `step`; its step, 0 if there is none."""
    steps = [s for s in Checkpoints(run).steps() if s < step]
    if not steps:
        return 0
    shutil.copytree(Checkpoints(run).path(steps[-1]), Checkpoints(again).path(steps[-1]))
    return steps[-1]


def _replay_config(config: TrainConfig, run_dir: Path, target: int) -> TrainConfig:
    saving = dataclasses.replace(config.checkpoint, every=0)
    changes = {"run_dir": str(run_dir), "stop_after": target, "resume": "auto", "loggers": {}, "max_wall_time": None}
    return dataclasses.replace(config, checkpoint=saving, **changes)


def _differences(recorded: dict[str, float], again: dict[str, float]) -> list[str]:
    keys = [key for key in {**recorded, **again} if recorded.get(key) != again.get(key)]
    return [f"step {again['step']} {key}: recorded {recorded.get(key)}, now {again.get(key)}" for key in keys]


if __name__ == "__main__":
    sys.exit(main())
