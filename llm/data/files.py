"""Files of text, local or at URLs: found by path, folder, glob, URL or list, and told apart by their contents."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llm.data.remote import RemoteFile, is_url
from llm.errors import UserError
from llm.paths import resolve

PLAIN = (".jsonl", ".ndjson", ".json", ".txt")
SUFFIXES = (*(kind + packed for kind in PLAIN for packed in ("", ".zst", ".gz")), ".parquet", ".arrow")
PROBE = 1 << 16  # bytes
N_PROBES = 256  # files up to 16 MB are hashed whole


def find_files(path: Any, *, key: str = "data.path") -> list[str]:
    """The text files at `path` (a file, folder, glob, URL or list of them), sorted within each entry, each once.

    Raises UserError, naming `key`, when an entry matches nothing, a file's kind is unknown or a file is empty.
    """
    entries = [path] if isinstance(path, (str, Path)) else list(path or [])
    if not entries:
        raise UserError(
            f"{key} is not set: give a file, a folder, a glob or a list of them, for example {key}=my.jsonl."
        )
    files = list(dict.fromkeys(file for entry in entries for file in _match(str(entry), key)))
    for file in files:
        if not (urlsplit(file).path if is_url(file) else file).endswith(SUFFIXES):
            raise UserError(f"{key}: {file} is of an unknown kind. Files of text end in {', '.join(SUFFIXES)}.")
        if file_size(file) == 0:
            raise UserError(f"{key}: {file} is empty.")
    return files


def _match(entry: str, key: str) -> list[str]:
    """Files of one entry, sorted by name."""
    if is_url(entry):
        return [entry]
    where = Path(resolve(entry))
    if where.is_file():
        return [str(where)]
    if where.is_dir():
        # a bare .json in a folder of text is more often something about the text
        kinds = tuple(suffix for suffix in SUFFIXES if suffix != ".json")
        inside = sorted(str(file) for file in where.rglob("*") if file.is_file() and file.name.endswith(kinds))
    else:
        inside = sorted(file for file in glob.glob(str(where), recursive=True) if Path(file).is_file())
    if not inside:
        what = "holds no text file" if where.is_dir() else "does not exist"
        raise UserError(f"{key}={entry}: {what}. Files of text end in {', '.join(SUFFIXES)}.")
    return inside


def file_size(file: str) -> int:
    """Bytes of a file or of what is at a URL."""
    return RemoteFile(file).size() if is_url(file) else Path(file).stat().st_size


def content_hash(file: str) -> str:
    """Tells whether a file changed: a hash of its size and contents; of probes of them where it is large or remote."""
    with RemoteFile(file) if is_url(file) else open(file, "rb") as opened:
        size = opened.seek(0, 2)
        sha = hashlib.sha256(str(size).encode())
        for start in [0] if is_url(file) else _probes(size):
            opened.seek(start)
            sha.update(opened.read(PROBE))
    return sha.hexdigest()[:16]


def _probes(size: int) -> range | list[int]:
    """Where to read PROBE bytes: everywhere, or at N_PROBES places from the first byte to the last."""
    if size <= N_PROBES * PROBE:
        return range(0, size, PROBE)
    return [index * (size - PROBE) // (N_PROBES - 1) for index in range(N_PROBES)]
