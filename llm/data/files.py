"""Local files of text: found by path, folder, glob or list, and read document by document."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Any

from llm.errors import UserError
from llm.paths import resolve

LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
PROBE = 1 << 16  # bytes
N_PROBES = 256  # files up to 16 MB are hashed whole
SUFFIXES = (*LINE_SUFFIXES, *(f"{suffix}.zst" for suffix in LINE_SUFFIXES), ".txt", ".txt.zst", *TABLE_SUFFIXES)


def find_files(path: Any, *, key: str = "data.path") -> list[Path]:
    """The text files at `path` (a file, folder, glob or list of them), sorted within each entry, each once.

    Raises UserError, naming `key`, when an entry matches nothing, a file's kind is unknown or a file is empty.
    """
    entries = [path] if isinstance(path, (str, Path)) else list(path or [])
    if not entries:
        raise UserError(
            f"{key} is not set: give a file, a folder, a glob or a list of them, for example {key}=my.jsonl."
        )
    found = [file for entry in entries for file in _match(str(entry), key)]
    files = list(dict.fromkeys(found))
    for file in files:
        _check(file, key)
    return files


def _match(entry: str, key: str) -> list[Path]:
    """Files of one entry, sorted by name."""
    where = Path(resolve(entry))
    if where.is_file():
        return [where]
    if where.is_dir():
        inside = sorted(file for file in where.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    else:
        inside = sorted(Path(file) for file in glob.glob(str(where), recursive=True) if Path(file).is_file())
    if not inside:
        what = "holds no text file" if where.is_dir() else "does not exist"
        raise UserError(f"{key}={entry}: {what}. Files of text end in {', '.join(SUFFIXES)}.")
    return inside


def _check(file: Path, key: str) -> None:
    if not file.name.endswith(SUFFIXES):
        raise UserError(f"{key}: {file} is of an unknown kind. Files of text end in {', '.join(SUFFIXES)}.")
    if file.stat().st_size == 0:
        raise UserError(f"{key}: {file} is empty.")


def content_hash(file: Path) -> str:
    """Tells whether a file changed: a hash of its size and contents; of probes of them where it is large."""
    size = file.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for start in _probes(size):
            opened.seek(start)
            sha.update(opened.read(PROBE))
    return sha.hexdigest()[:16]


def _probes(size: int) -> range | list[int]:
    """Where to read PROBE bytes: everywhere, or at N_PROBES places from the first byte to the last."""
    if size <= N_PROBES * PROBE:
        return range(0, size, PROBE)
    return [index * (size - PROBE) // (N_PROBES - 1) for index in range(N_PROBES)]
