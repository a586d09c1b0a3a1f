"""The report as one HTML file: data, style and script inside, nothing fetched."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from llm.compare.tables import Table

SCRIPTS = ("scale.js", "plot.js", "page.js")
FIRST = ("contenders", "differences", "notes")  # above the plots; the other tables are folded away below


def as_html(title: str, summary: str, tables: list[Table], data: dict[str, Any]) -> str:
    """The page. `data` is JSON data with the plots under 'plots', as `Plot.as_json` gives them."""
    text = _asset("page.html")
    parts = {
        "TITLE": escape(title),
        "SUMMARY": escape(summary),
        "STYLE": _asset("style.css"),
        "SCRIPT": "\n".join(map(_asset, SCRIPTS)),
        "FIRST_TABLES": "\n".join(_section(t, folded=False) for t in tables if t.id in FIRST),
        "OTHER_TABLES": "\n".join(_section(t, folded=True) for t in tables if t.id not in FIRST),
        # "<" would let data end the script element that holds it
        "DATA": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    pieces = text.split("@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (files("llm.compare") / "assets" / name).read_text(encoding="utf-8")


def _section(table: Table, *, folded: bool) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    table_html = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    region = f'role="region" aria-label="{escape(table.title)}" tabindex="0"'  # so that the keyboard can scroll it
    body = f'<div class="scroll" {region}>{table_html}</div>'
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    title = escape(table.title)
    if folded:
        return f'<section id="{table.id}"><details><summary>{title}</summary>{body}{note}</details></section>'
    return f'<section id="{table.id}"><h2>{title}</h2>{body}{note}</section>'
