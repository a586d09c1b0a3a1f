"""Are two runs the same, bit for bit?

python -m llm.runs_equal RUN OTHER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from llm.checkpoint import TENSOR_GROUPS, Checkpoints
from llm.cli import command
from llm.errors import UserError
from llm.metrics import TIMINGS


@command
def main(words: list[str] | None = None) -> int:
    """The command line; exit code 0 when the runs are equal, else 1."""
    parser = argparse.ArgumentParser(prog="python -m llm.runs_equal", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("other", type=Path, help="folder of the other")
    options = parser.parse_args(words)
    for run in (options.run, options.other):
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run} is no run: it has no metrics.jsonl.")
    found = differences_of_runs(options.run, options.other)
    if found:
        print(f"{options.run} and {options.other} DIFFER:", *found, sep="\n  ")
    else:
        step, lines = Checkpoints(options.run).steps()[-1], len(metrics_of(options.run))
        print(
            f"{options.run} and {options.other} are the same bit for bit: {lines} lines of metrics, and weights, "
            f"optimizer, random generators and data position of step {step}"
        )
    return int(bool(found))


def differences_of_runs(one: Path | str, other: Path | str) -> list[str]:
    """What differs between the metrics and newest checkpoints of two runs; timings aside, nothing if they are equal."""
    one, other = Path(one), Path(other)
    found = []
    if metrics_of(one) != metrics_of(other):
        found.append("metrics.jsonl")
    left, right = (Checkpoints(run).load_newest() for run in (one, other))
    if left is None or right is None:
        return [*found, "a run without a checkpoint"]
    for group in TENSOR_GROUPS:
        mine, theirs = getattr(left, group), getattr(right, group)
        both = mine.keys() & theirs.keys()
        unlike = [name for name in both if not _same_bits(mine[name], theirs[name])]
        found += [f"{group}: {name}" for name in sorted([*unlike, *(mine.keys() ^ theirs.keys())])]
    found += [key for key in left.state if left.state[key] != right.state.get(key)]
    return found


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what differs from start to start."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


if __name__ == "__main__":
    sys.exit(main())
