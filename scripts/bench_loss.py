"""Compare ways to compute the output head's cross-entropy: time, memory, and gradients against fp64.

Ours at several chunk sizes, compiled and eager; liger-kernel's fused one, where it is installed; full logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from llm.bench.losses import exact, implementations, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="tokens a chunk")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, device=device).requires_grad_()
    weight = (0.02 * torch.randn(options.vocabulary, options.width, device=device)).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), device=device)
    truth = exact(hidden, weight, targets)
    print("| loss | ms | peak MiB | error of the loss | of d hidden | of d weight |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = []
    for name, function in implementations(options.chunks).items():
        row = measure(name, function, hidden, weight, targets, truth)
        rows.append(row)
        if row.failed:
            print(f"| {name} | {row.failed} | | | | |", flush=True)
            continue
        errors = " | ".join(f"{e:.1e}" for e in (row.loss_error, row.hidden_error, row.weight_error))
        print(f"| {name} | {row.milliseconds:.2f} | {row.memory:.0f} | {errors} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
