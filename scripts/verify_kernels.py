"""Check every Triton kernel on this machine's GPU against fp64; exit code 1 if any output is over its error budget."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from mixer_kernels.verify import check_all, jobs, large_jobs, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="operators to check; all by default")
    parser.add_argument(
        "--all", action="store_true", help="also steps in all sizes, rows of 32,768 tokens and more than 2^31 elements"
    )
    parser.add_argument("--failures", action="store_true", help="list every failure, not only the worst case of each")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("verify_kernels needs a CUDA device; on a CPU the tests run the kernels in Triton's interpreter.")
        return 2
    begin = time.perf_counter()
    results = check_all(jobs("cuda", ops=arguments.ops, every_step=arguments.all))
    if arguments.all:  # one after the other: they need tens of gigabytes
        results += check_all(large_jobs("cuda", arguments.ops), workers=1)
    print(table(results))
    failed = [r for r in results if not r.passed]
    if arguments.failures:
        print(*failed, sep="\n")
    passed = f"{len(results) - len(failed)} of {len(results)} outputs within budget"
    print(f"{passed}, {time.perf_counter() - begin:.0f} s on {torch.cuda.get_device_name()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
