"""Files that survive a crash: written aside, synced to the disk, then renamed into place."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

TEMPORARY = ".tmp-"  # names that begin so are leftovers of a crash, whenever nobody is writing


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and sync it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Give `path` this content, so that at any instant it has the old one or the new one whole."""
    aside = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        write_file(aside, content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
