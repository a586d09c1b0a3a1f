"""Measure the data paths: preparing, serving prepared data (beside a bare memory map), streaming, and resuming.

python scripts/bench_data.py FOLDER --tokenizer TOKENIZER --workers 0 1 2
Beside each speed stands how many GPUs it feeds, at what one GPU takes when it trains a 340M model (--consumption).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llm.cli import command
from llm.config import DataConfig
from llm.data import Rows, TextFiles, batches, training_rows
from llm.data.encode import Encoder
from llm.data.order import Feistel
from llm.data.prepare import Job, prepare
from llm.tokenizer import load_tokenizer

ROWS = 8  # a micro-batch


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files, folders or globs of text")
    parser.add_argument("--tokenizer", default="bundled:tokenizer", help="folder or hub name")
    parser.add_argument("--context", type=int, default=4096, help="tokens a row")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="numbers of processes to stream with")
    parser.add_argument("--prepare-workers", type=int, default=2, help="processes to prepare with")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each speed is measured")
    parser.add_argument(
        "--progress", type=int, default=5, help="steps after which resuming is timed, and 50 times as many"
    )
    parser.add_argument("--consumption", type=float, default=160e3, help="tokens a second that one GPU takes")
    return parser.parse_args()


@command
def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    tokenizer, source = load_tokenizer(arguments.tokenizer), TextFiles(arguments.paths)

    def report(what: str, speed: float) -> None:
        print(f"{what:<44} {speed / 1e6:>9.3f} M tokens/s  {speed / arguments.consumption:>8.1f} GPUs", flush=True)

    def rows_of(source: TextFiles, **values: Any) -> Rows:
        return training_rows(DataConfig(name="bench", **values), source, tokenizer, arguments.context)

    with tempfile.TemporaryDirectory() as folder:
        speed = time_preparation(source, Encoder(tokenizer), Path(folder) / "out", arguments.prepare_workers)
        report(f"prepare, {arguments.prepare_workers} processes", speed)
        prepared = rows_of(TextFiles(f"{folder}/out"))
        report("prepared: bare memory map, rows at random", bare_speed(prepared, arguments.context, arguments.seconds))
        for packing in ("cut", "fit"):
            rows = rows_of(TextFiles(f"{folder}/out"), packing=packing)
            report(f"prepared: batches, packing={packing}", serving_speed(rows, 0, arguments.seconds))
    for workers in arguments.workers:
        rows = rows_of(source, mode="stream")
        report(f"streaming: batches, {workers} processes", serving_speed(rows, workers, arguments.seconds))
    for steps in (arguments.progress, 50 * arguments.progress):
        seconds, size = time_resume(rows_of(source, mode="stream"), steps)
        tokens = steps * ROWS * arguments.context
        print(f"resume a stream after {tokens:>12,} tokens: {seconds:.2f} s, state {size:,} bytes")


def time_preparation(source: TextFiles, encoder: Encoder, out: Path, workers: int) -> float:
    """Tokens a second of a whole preparation, starting the processes included."""
    job = Job(source.training_shards(), encoder, 0.0, {"path": "bench", "identity": "", "licence": ""})
    start = time.perf_counter()
    tokens = sum(record["train"].tokens for _, _, record in prepare(job, out, workers=workers) if record)
    return tokens / (time.perf_counter() - start)


def bare_speed(rows: Any, context: int, seconds: float) -> float:
    """Tokens a second of reading rows at random from the largest piece with numpy alone, as int64 batches."""
    tokens = max((piece.tokens for piece in rows.store.pieces), key=len)
    order = Feistel(len(tokens) // context - 1, 0).map(np.arange(len(tokens) // context - 1))

    def batch(i: int) -> Any:
        starts = [order[(i * ROWS + j) % len(order)] * context for j in range(ROWS)]
        return np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)

    return speed_of(batch, ROWS * context, seconds)


def serving_speed(rows: Rows, workers: int, seconds: float) -> float:
    """Tokens a second of batches, after the first few."""
    loader = batches(rows, micro_batch=ROWS, rows_per_step=ROWS, workers=workers)
    for _ in range(8):
        next(loader)
    speed = speed_of(lambda _: next(loader), ROWS * rows.context, seconds)
    loader.close()
    return speed


def speed_of(work: Callable[[int], Any], tokens: int, seconds: float) -> float:
    """Tokens a second of `work`, of `tokens` a call."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        work(calls)
        calls += 1
    return calls * tokens / (time.perf_counter() - start)


def time_resume(rows: Rows, steps: int) -> tuple[float, int]:
    """Seconds from a state to the next batch, and the state's size as JSON."""
    loader = batches(rows, micro_batch=ROWS, rows_per_step=ROWS)
    for _ in range(steps):
        state = next(loader).state
    start = time.perf_counter()
    next(batches(rows, micro_batch=ROWS, rows_per_step=ROWS, state=state))
    return time.perf_counter() - start, len(json.dumps(state))


if __name__ == "__main__":
    sys.exit(main())
