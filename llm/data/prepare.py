"""Tokenising a source once, into memory-mapped shards: in parallel, resumable, nothing half-written taken for whole.

A prepared folder holds manifest.json (written last: without it the folder is not whole) and for each split a folder of
pieces: NNNNN.tokens (little-endian uint16 or uint32, documents end to end, each with its end-of-document token) and
NNNNN.first (int64, where each document begins).
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llm.data.encode import Encoder
from llm.data.files import content_hash
from llm.data.order import digest
from llm.data.shards import Shard
from llm.data.split import is_held_out
from llm.data.stream import SEQUENTIAL_PARTS
from llm.durable import TEMPORARY, replace_file
from llm.errors import UserError

FORMAT = 1
BLOCKS_PER_PIECE = 64
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Job:
    """What is prepared: all that the contents of the folder depend on.

    source   describes the text: `identity` (its hash), `path`, `licence`
    """

    shards: list[Shard]
    encoder: Encoder
    held_out: float
    source: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """As they are written into the folder."""
        return {
            "format": FORMAT,
            "tokenizer": self.encoder.fingerprint,
            "dtype": np.dtype(self.encoder.dtype).name,
            "held_out": self.held_out,
            "source": self.source,
        }

    def units(self) -> list[tuple[int, int, int]]:
        """Shard, part, parts of each piece: the same whatever the number of processes."""
        parts = [self._parts(shard.n_blocks()) for shard in self.shards]
        return [(shard, part, n) for shard, n in enumerate(parts) for part in range(n)]

    @staticmethod
    def _parts(n_blocks: int | None) -> int:
        return SEQUENTIAL_PARTS if n_blocks is None else -(-n_blocks // BLOCKS_PER_PIECE)


@dataclass(frozen=True)
class PieceRecord:
    """A finished piece: what a reader checks it against."""

    name: str
    documents: int
    tokens: int
    sha256: str  # of the tokens
    probe: str  # `content_hash` of the tokens: quick even for large files


def prepare(job: Job, out: Path, *, workers: int) -> Iterator[tuple[int, int, dict[str, PieceRecord]]]:
    """Write `out`, going on where an earlier, interrupted call with the same job stopped.

    With 0 workers the work is done in this process. Yields, for each piece as it is done (the ones found done first),
    the number done, of how many, and its records by split. Raises UserError when the folder holds another job, the text
    is wrong, a process dies or the disk is full.
    """
    _claim(job, out)
    units = job.units()
    records: dict[int, dict[str, PieceRecord]] = {}
    for index in range(len(units)):
        record = out / "records" / f"{index:05}.json"
        if record.exists():
            found = json.loads(record.read_text())
            records[index] = {split: PieceRecord(**values) for split, values in found.items()}
            yield len(records), len(units), records[index]
    todo = [index for index in range(len(units)) if index not in records]
    made_here = ((index, make_piece(job, out, index)) for index in todo)
    for index, made in _in_processes(job, out, todo, workers) if workers else made_here:
        records[index] = made
        yield len(records), len(units), made
    _finish(job, out, [records[index] for index in range(len(units))])


def _claim(job: Job, out: Path) -> None:
    """Make the folder this job's, or check that it is."""
    out.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(job.settings(), indent=2)
    if (out / MANIFEST).exists():
        raise UserError(f"{out} is prepared already: remove it or choose another folder.")
    claim = out / "job.json"
    if claim.exists():
        if claim.read_text() != settings:
            raise UserError(f"{out} holds an unfinished preparation of another source or with other settings.")
    elif any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose a new folder.")
    else:
        replace_file(claim, settings.encode())
    for folder in ("records", *SPLITS):
        (out / folder).mkdir(exist_ok=True)
    for left in out.rglob(f"{TEMPORARY}*"):
        left.unlink()


def _in_processes(job: Job, out: Path, todo: list[int], workers: int) -> Iterator[tuple[int, dict[str, PieceRecord]]]:
    """Make the pieces `todo`, several at a time; yields each one's records when it is done."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_process) as pool:
        waiting = iter(todo)
        running = {pool.submit(make_piece, job, out, index): index for index in islice(waiting, 2 * workers)}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                    running |= {pool.submit(make_piece, job, out, index): index for index in islice(waiting, 1)}
        except BrokenProcessPool as error:
            raise UserError(
                "A process of the preparation was killed (out of memory?): take fewer with --workers and run the same "
                "command again, it goes on where it stopped."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_process() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def make_piece(job: Job, out: Path, index: int) -> dict[str, PieceRecord]:
    """Tokenise one unit into its files, then record it. UserError when the disk is full."""
    shard, part, parts = job.units()[index]
    try:
        with ExitStack() as stack:
            writers = {split: stack.enter_context(PieceWriter(out / split, index)) for split in SPLITS}
            for texts in job.shards[shard].groups(key=None, part=part, parts=parts, skip=0):
                held_out = [is_held_out(text, job.held_out) for text in texts]
                for tokens, held in zip(job.encoder.stream(texts), held_out, strict=True):
                    writers["validation" if held else "train"].add(tokens)
            records = {split: writer.finish() for split, writer in writers.items() if writer.documents}
        content = json.dumps({split: asdict(record) for split, record in records.items()})
        replace_file(out / "records" / f"{index:05}.json", content.encode())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{out}: no space left. Free some and run the same command again: it goes on.") from error
        raise
    return records


class PieceWriter:
    """Writes the two files of a piece under temporary names; `finish` syncs and renames them."""

    def __init__(self, folder: Path, index: int) -> None:
        self._folder, self._name = folder, f"{index:05}"
        self._aside = {kind: folder / f"{TEMPORARY}{self._name}.{kind}" for kind in ("tokens", "first")}
        self._sha, self._first, self._tokens = hashlib.sha256(), [], 0

    @property
    def documents(self) -> int:
        return len(self._first)

    def __enter__(self) -> PieceWriter:
        self._file = self._aside["tokens"].open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        for path in self._aside.values():
            path.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray) -> None:
        """Append a document."""
        content = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes()
        self._file.write(content)
        self._sha.update(content)
        self._first.append(self._tokens)
        self._tokens += len(tokens)

    def finish(self) -> PieceRecord:
        """Make the files whole under their own names."""
        self._file.flush()
        os.fsync(self._file.fileno())
        replace_file(self._folder / f"{self._name}.first", np.asarray(self._first, "<i8").tobytes())
        path = self._folder / f"{self._name}.tokens"
        os.replace(self._aside["tokens"], path)
        return PieceRecord(self._name, self.documents, self._tokens, self._sha.hexdigest(), content_hash(str(path)))


def _finish(job: Job, out: Path, records: list[dict[str, PieceRecord]]) -> None:
    """Write the manifest, then remove what only an unfinished preparation needs."""
    splits = {split: [asdict(record[split]) for record in records if split in record] for split in SPLITS}
    if not splits["train"]:
        if splits["validation"]:
            raise UserError(
                f"{job.source['path']}: --held-out {job.held_out} holds out every document, none is left to train on. "
                "Make it smaller, or 0."
            )
        raise UserError(f"{job.source['path']}: no document has any text to prepare (--text-column).")
    manifest = {**job.settings(), "splits": splits, "fingerprint": digest(job.settings(), splits)}
    replace_file(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    shutil.rmtree(out / "records")
    (out / "job.json").unlink()
