"""Time the operators on this machine's GPU, beside their chunkwise form, flash-linear-attention and softmax."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path

import torch

from mixer_kernels import bench, peer, report
from mixer_kernels.spec import all_specs


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        print("bench_kernels needs a CUDA device.")
        return 2
    cases = [
        (spec, case)
        for spec in all_specs().values()
        if not arguments.ops or spec.name in arguments.ops
        for case in spec.bench_cases
        if any(fnmatch(case.name, pattern) for pattern in arguments.cases)
    ]
    limits = bench.ceilings()
    where = report.environment(limits, peer.version())
    print(", ".join(f"{what} {x}" for what, x in where.items()), flush=True)
    timings = []
    for timing in bench.run(cases, limits, arguments.without, arguments.peer_choices):
        timings.append(timing)
        print(report.kernels(timing) if arguments.kernels else report.line(timing), flush=True)
    print(report.table(timings))
    if arguments.out:
        report.save(arguments.out, where, timings)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="operators to time; all by default")
    parser.add_argument(
        "--cases", nargs="+", default=["*"], help="only cases of these names, like scalar or 'kda, T *'"
    )
    choices = ("chunked", "fla", "softmax", "first calls")
    parser.add_argument("--without", nargs="*", default=[], choices=choices, help="leave these out")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel as well")
    parser.add_argument("--peer-choices", type=Path, help="folder that keeps what the peer's autotuners chose")
    parser.add_argument("--out", type=Path, help="folder for table.md, timings.json and, with matplotlib, a plot")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
