"""Reading what scripts/prepare_data.py wrote."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from llm.data.encode import Encoder
from llm.data.files import content_hash, entries_of
from llm.data.order import digest
from llm.data.prepare import FORMAT, MANIFEST, PieceRecord
from llm.data.store import Piece, TokenStore
from llm.durable import sha256
from llm.errors import UserError
from llm.paths import resolve


def is_prepared(path: Any) -> bool:
    """Is it a folder that was prepared to its end?"""
    return isinstance(path, (str, Path)) and (Path(resolve(path)) / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises UserError when there is none or it is of another format or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except OSError as error:
        hint = "Run scripts/prepare_data.py, to its end, and give the folder it wrote; text as it is: data.mode=auto."
        raise UserError(f"data.path={folder}: not a prepared folder (no {MANIFEST} there). {hint}") from error
    except ValueError as error:
        raise UserError(f"data.path={folder}: {MANIFEST} is damaged ({error}). Prepare the data again.") from error
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"data.path={folder}: prepared in format {manifest.get('format')}, this version reads {FORMAT}."
        )
    settings = {key: manifest[key] for key in ("format", "tokenizer", "dtype", "held_out", "source")}
    if digest(settings, manifest["splits"]) != manifest["fingerprint"]:
        raise UserError(f"data.path={folder}: {MANIFEST} was changed after it was written. Prepare the data again.")
    return manifest


def open_prepared(path: Any, split: str, encoder: Encoder) -> TokenStore:
    """The tokens of one split, memory-mapped.

    Raises UserError when they are of another tokenizer, or a piece is missing, cut short or changed (files over 16 MB
    are probed, `verify` reads them whole).
    """
    entries = entries_of(path)
    if len(entries) > 1:
        raise UserError(f"data.path={path} data.mode=prepared: give one folder that scripts/prepare_data.py wrote.")
    folder = Path(resolve(entries[0]))
    manifest = read_manifest(folder)
    if manifest["tokenizer"] != encoder.fingerprint:
        raise UserError(
            f"data.path={folder} was prepared with another tokenizer (or data.bos): its fingerprint is "
            f"{manifest['tokenizer']}, that of tokenizer.path {encoder.fingerprint}. Take that one, or prepare again."
        )
    records = [PieceRecord(**record) for record in manifest["splits"][split]]
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda record: _open_piece(folder / split, record, dtype), records))
    return TokenStore(pieces, digest(manifest["fingerprint"], split))


def _open_piece(folder: Path, record: PieceRecord, dtype: np.dtype) -> Piece:
    tokens, first = folder / f"{record.name}.tokens", folder / f"{record.name}.first"
    for path, size in ((tokens, record.tokens * dtype.itemsize), (first, record.documents * 8)):
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise UserError(f"{path}: {found or 'missing, not'} {'of ' * bool(found)}{size:,} bytes. Prepare it again.")
    if content_hash(str(tokens)) != record.probe:
        raise UserError(f"{tokens}: not the tokens that were written. Prepare the data again.")
    return Piece(np.memmap(tokens, dtype=dtype, mode="r"), np.fromfile(first, dtype="<i8"))


def verify(folder: Path) -> int:
    """Read every byte and compare it with the manifest; the number of pieces. Raises UserError naming what differs."""
    manifest = read_manifest(folder)
    pieces = [(split, PieceRecord(**record)) for split, records in manifest["splits"].items() for record in records]
    for split, record in pieces:
        path = folder / split / f"{record.name}.tokens"
        if not path.exists() or sha256(path) != record.sha256:
            raise UserError(f"{path}: not the tokens that were written. Prepare the data again.")
    return len(pieces)
