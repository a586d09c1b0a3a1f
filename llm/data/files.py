"""Files of text, local or at URLs: found by path, folder, glob, URL or list, and told apart by their contents."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Mapping, Sequence
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
    entries = entries_of(path, key=key)
    files = list(dict.fromkeys(file for entry in entries for file in _match(entry, key)))
    for file in files:
        if not (urlsplit(file).path if is_url(file) else file).endswith(SUFFIXES):
            raise UserError(f"{key}: {file} is of an unknown kind. Files of text end in {', '.join(SUFFIXES)}.")
        if file_size(file) == 0:
            raise UserError(f"{key}: {file} is empty.")
    return files


def entries_of(path: Any, *, key: str = "data.path") -> list[str]:
    """The entries of a path or a list of them. UserError, naming `key`, for none, an empty one or what is no path.

    An empty entry would mean the working directory, where there may be anything.
    """
    remedy = f"give a file, a folder, a glob or a list of them, for example {key}=my.jsonl."
    if path is None:
        raise UserError(f"{key} is not set: {remedy}")
    entries = list(path) if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    for entry in entries:
        if not isinstance(entry, (str, Path, int)) or isinstance(entry, bool):
            hint = " (data=mix takes a mapping)" if isinstance(entry, Mapping) else ""
            raise UserError(f"{key}={path}: {entry} is not a path{hint}: {remedy}")
    if not entries or not all(str(entry).strip() for entry in entries):
        raise UserError(f"{key} is empty{f' in {entries}' if len(entries) > 1 else ''}: {remedy}")
    return [str(entry) for entry in entries]


def sets_of(paths: Any, *, key: str = "data.validation_path") -> dict[str, Any]:
    """Paths of text by the name of the set: a mapping, or one set "validation"; none for None. Checked as above."""
    if paths is None:
        return {}
    named = paths if isinstance(paths, Mapping) else {"validation": paths}
    if not named:
        raise UserError(f"{key} is empty: give a file, or a mapping of names to files.")
    for name, path in named.items():
        entries_of(path, key=f"{key}.{name}" if isinstance(paths, Mapping) else key)
    return dict(named)


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
