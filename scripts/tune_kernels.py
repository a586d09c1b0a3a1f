"""Find the fastest launch configurations on this machine's GPU among those that are right, and print them."""

from __future__ import annotations

import argparse
import sys

import torch

from mixer_kernels.spec import all_specs
from mixer_kernels.tune import save, tune


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=sorted(all_specs()))
    parser.add_argument("--first", type=int, default=2, help="tune on the first so many cases of its benchmark")
    parser.add_argument("--best", type=int, default=6, help="how many trials of each kernel to print")
    parser.add_argument("--write", action="store_true", help="write the best settings into the operator's configs.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_kernels needs a CUDA device.")
        return 2
    spec = all_specs()[arguments.op]
    for (case, kernel), trials in tune(spec, spec.bench_cases[: arguments.first]).items():
        print(f"{spec.name} {case}: {kernel}, {len(trials)} candidates are right")
        for t in sorted(trials, key=lambda t: t.time)[: arguments.best]:
            print(f"    {t.time:.3f} ms  error/budget {t.share:.2f}  {t.settings}", flush=True)
    if arguments.write:
        save(spec.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
