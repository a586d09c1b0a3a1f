"""Small corpora and helpers of the data tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm.config import DataConfig
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
