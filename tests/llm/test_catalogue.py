"""The page about mixers says what they are."""

from __future__ import annotations

from pathlib import Path

from llm.catalogue import entries, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mixers.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/describe_mixers.py"


def test_every_mixer_says_what_it_computes_and_whose_it_is():
    for entry in entries():
        assert entry.recurrence, f"{entry.name}: the docstring has no ``formula``"
        assert any(word in entry.text for word in ("arXiv", "et al.", "20")), f"{entry.name}: no source"
