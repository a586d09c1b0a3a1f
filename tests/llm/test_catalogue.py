"""The page about mixers says what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llm.catalogue import Entry, entries, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mixers.md"


@pytest.fixture(scope="module")
def mixers() -> list[Entry]:
    return entries()


def test_the_page_is_current(mixers):
    assert PAGE.read_text(encoding="utf-8") == page(mixers), "run python scripts/describe_mixers.py"


def test_every_mixer_says_what_it_computes_and_whose_it_is(mixers):
    for entry in mixers:
        assert entry.recurrence, f"{entry.name}: the docstring has no ``formula``"
        assert re.search(r"arXiv|et al\.|(19|20)\d\d", entry.text), f"{entry.name}: no source"
