"""Small corpora and helpers of the data tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from llm.config import DataConfig
from llm.data import shards, stored, stream
from llm.tokenizer import load_tokenizer

WORDS = ["the", "whale", "sea", "ship", "captain", "storm", "deck", "sail", "a", "of", "and", "to", "in", "was", "it"]


def make_texts(count, *, longest=120, salt=0):
    """Texts of 1 to `longest` words, each beginning with a number of its own."""

    def text(i):
        length = (i * 37) % longest + 1
        return " ".join([f"{salt}-{i}", *(WORDS[(i * 7 + j * (i + 3) + salt) % len(WORDS)] for j in range(length))])

    return [text(i) for i in range(count)]


def write_jsonl(path, texts, column="text"):
    """One record a line."""
    Path(path).write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_documents(path, texts, batch_rows=100):
    """The texts as the kind of file that the name asks for."""
    bare = path.with_suffix("") if path.suffix in (".zst", ".gz") else path
    if bare.suffix == ".jsonl":
        content = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
        if path.suffix == ".zst":
            content = pytest.importorskip("zstandard").compress(content)
        if path.suffix == ".gz":
            content = gzip.compress(content)
        path.write_bytes(content)
        return path
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"id": list(range(len(texts))), "text": texts})
    if path.name == "stream.arrow":
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    elif path.suffix == ".arrow":
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    else:
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path, row_group_size=batch_rows)
    return path


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("bundled:tokenizer")


@pytest.fixture
def texts():
    return make_texts


@pytest.fixture
def jsonl():
    return write_jsonl


@pytest.fixture
def settings():
    """Data settings with the given values."""

    def make(**values):
        return DataConfig(**{"name": "test", "mode": "memory", **values})

    return make


@pytest.fixture
def write_file():
    return write_documents


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, groups and windows so small that little text has many."""
    monkeypatch.setattr(shards, "SPAN", 997)
    monkeypatch.setattr(shards, "GROUP_ROWS", 8)
    monkeypatch.setattr(stored, "WINDOW_ROWS", 4)
    monkeypatch.setattr(stored, "GROUP", 3)
    monkeypatch.setattr(stream, "WINDOW_ROWS", 4)
