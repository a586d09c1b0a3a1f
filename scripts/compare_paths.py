"""Train the same run eagerly, compiled, with full logits and without Triton kernels, and compare the loss curves.

    python scripts/compare_paths.py mixer=hybrid_gdn_3to1 model=60m data=local data.path=FOLDER steps=300 ...

Words are those of `python -m llm.train`. The measure is how far apart other orders of the data bring the curve. Exit
code 1 if a path is farther from the run as configured than that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from llm.bench.paths import REFERENCE, as_json, path_words, run_all, verdicts
from llm.cli import command


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="key=value")
    parser.add_argument("--without", nargs="*", default=[], help="paths to leave out")
    parser.add_argument("--orders", type=int, default=3, help="orders of the data, of at least 2")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time, if the device has room for them")
    parser.add_argument("--limit", type=float, default=3600, help="most seconds for a run")
    parser.add_argument("--json", type=Path, help="also write the figures and curves here")
    options = parser.parse_args()
    paths = {name: words for name, words in path_words(options.words).items() if name not in options.without}
    orders = {f"order {seed}": [f"data.seed={seed}"] for seed in range(1, options.orders)}
    runs = {name: [*options.words, *more] for name, more in (paths | orders).items()}
    with tempfile.TemporaryDirectory(prefix="paths-") as folder:
        curves = run_all(runs, Path(folder), at_once=options.at_once, limit=options.limit)
    rows = verdicts({name: curves[name] for name in paths}, [curves[name] for name in (REFERENCE, *orders)])
    print("| nats between curves | running mean, largest | mean | single steps, mean | within |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        figures = " | ".join(f"{row[key]:.2e}" for key in ("largest", "mean", "a step"))
        print(f"| {row['path']} | {figures} | {'yes' if row['within'] else 'NO'} |")
    if options.json:
        options.json.write_text(as_json(rows, curves))
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
