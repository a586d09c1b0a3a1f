"""Time real training steps of any configurations on this machine, beside what people use today.

    python scripts/bench_step.py mixer=softmax,gdn,kda,gla,hybrid_gdn_3to1 --peers
    python scripts/bench_step.py mixer=softmax,gdn --context 1024 4096 16384 65536 --tokens 65536 --plot sweep.png

Words are those of `python -m llm.train`, one of them may have several values; model=340m unless they say otherwise.
Tokens are random, documents log-normal with a mean of 1000 tokens. Each model has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm.bench.jobs import run_jobs
from llm.bench.timing import plot, split_table, table
from llm.cli import command
from llm.errors import UserError


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="key=value; commas in one of them make several models")
    parser.add_argument("--context", type=int, nargs="+", default=[4096], help="tokens a row, one or several")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step")
    packing = parser.add_mutually_exclusive_group()
    packing.add_argument("--whole", action="store_true", help="rows of one document only")
    packing.add_argument("--packed", action="store_true", help="rows of several documents only")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--peers", nargs="*", help="beside these peers; without names, all of them")
    parser.add_argument("--limit", type=int, default=600, help="most seconds for a model")
    parser.add_argument("--split", action="store_true", help="also what the parts of a step take")
    parser.add_argument("--profile", type=Path, help="write a trace and a table of a few steps into this folder")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also plot tokens a second (needs matplotlib)")
    options = parser.parse_args()
    timings = run_jobs(list(jobs(options)), limit=options.limit)
    print(table(timings), split_table(timings), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(t) for t in timings], indent=1))
    if options.plot:
        plot(timings, options.plot)
    return 1 if all(t.failed for t in timings) else 0


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each worker has to do."""
    shared = {"contexts": options.context, "tokens": options.tokens, "steps": options.steps, "split": options.split}
    shared |= {"profile": str(options.profile) if options.profile else None}
    packed = [False] if options.whole else [True] if options.packed else [False, True]
    models = [{"name": " ".join(words), "words": words, "packed": packed} for words in combinations(options.words)]
    peers = [{"name": name, "peer": name, "packed": [False]} for name in peer_names(options.peers)]
    return [shared | job for job in [*models, *peers]]


def combinations(words: list[str]) -> list[list[str]]:
    """The words once for each value of the one that has several."""
    several = [word for word in words if "," in word and "[" not in word]
    if len(several) > 1:
        raise UserError(f"{' '.join(several)}: only one word may have several values.")
    if not words:
        return []
    if not several:
        return [words]
    key, _, values = several[0].partition("=")
    return [[f"{key}={value}" if word == several[0] else word for word in words] for value in values.split(",")]


def peer_names(wanted: list[str] | None) -> list[str]:
    """All peers for an empty list, none for None."""
    if wanted is None:
        return []
    from llm.bench.peers import PEERS

    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise UserError(f"--peers {unknown[0]}: there is no such peer. Choose among {', '.join(PEERS)}.")
    return wanted or list(PEERS)


if __name__ == "__main__":
    sys.exit(main())
