"""The table of docs/export.md."""

from __future__ import annotations

from llm.export import table


def test_page_is_current():
    made, text = table.table(), table.page().read_text()
    assert text == table.with_table(text, made), "run python -m llm.export.table --write"
    assert "| `hybrid_gdn_3to1` | defaults | qwen3_5_text |" in made
    assert "|  | `softmax.qk_norm=false` | self-contained: qwen3_5_text needs qk_norm=true |" in made
