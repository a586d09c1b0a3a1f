"""Time the operators on this machine's GPU, beside their chunkwise form, flash-linear-attention and softmax."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from mixer_kernels import bench
from mixer_kernels.spec import all_specs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="operators to time; all by default")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--first", type=int, default=None, help="only the first so many cases of each operator")
    parser.add_argument("--without", nargs="*", default=[], help="leave out: chunked, fla, softmax")
    parser.add_argument("--kernels", action="store_true", help="also the time of each kernel")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels needs a CUDA device.")
        return 2
    timings = [] if "softmax" in arguments.without else bench.time_softmax(batch=8, tokens=4096, heads=16, head_dim=64)
    report(timings)
    for spec in all_specs().values():
        if arguments.ops and spec.name not in arguments.ops:
            continue
        for case in [c for c in spec.bench_cases if arguments.cases in c.name][: arguments.first]:
            functions = bench.implementations(spec, case, peer="fla" not in arguments.without)
            rows = [
                bench.time_operator(spec, case, who, function)
                for who, function in functions.items()
                if who not in arguments.without
            ]
            report(rows, kernels=arguments.kernels)
            timings += rows
    if arguments.json:
        arguments.json.write_text(json.dumps([t._asdict() for t in timings], indent=1))
    return 0


def report(timings: list[bench.Timing], *, kernels: bool = False) -> None:
    """One line a timing, with `kernels` another for the microseconds of each kernel."""
    for t in timings:
        figures = f"forward {t.forward:8.3f} ms  forward+backward {t.both:8.3f} ms (GPU busy {t.busy:8.3f})"
        print(f"{t.op:18s} {t.case:24s} {t.who:16s} {figures}  peak {t.memory:7.0f} MiB", flush=True)
        if kernels:
            print("    us:", ", ".join(f"{name} {time:.0f}" for name, time in t.kernels.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
