"""The file of an evaluation, RUN/evaluations/step_<step>-<number>.json, and how a terminal shows it.

    {"schema_version": 1, "run": ..., "step": ..., "created": ..., "command": [...], "device": ..., "precision": ...,
     "settings": {...}, "validation": [...], "recall": [...], "decoding": [...], "notes": [...],
     "series": [{"measure": "loss_by_length", "name": "validation", "points": [[4096, 2.31], [8192, null]]}, ...]}

`series` says the main figures of the three sections again as curves, which is what `llm.compare` reads; null is what
did not fit into memory. No file is ever written over: another evaluation gets the next number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm.columns import in_columns
from llm.durable import TEMPORARY, sync, write_file
from llm.report import human_bytes

SCHEMA_VERSION = 1
NO_MEMORY = "out of memory"


def write(run_dir: Path, result: dict[str, Any]) -> Path:
    """Store a result under the next free number; it is there whole or not at all."""
    folder = run_dir / "evaluations"
    folder.mkdir(exist_ok=True)
    aside = folder / f"{TEMPORARY}{os.getpid()}"
    number = 1
    try:
        write_file(aside, json.dumps(_finite(result), indent=1).encode())
        while True:
            path = folder / f"step_{result['step']:08d}-{number:03d}.json"
            try:
                os.link(aside, path)  # fails where there is one
                break
            except FileExistsError:
                number += 1
    finally:
        aside.unlink(missing_ok=True)
    sync(folder)
    return path


def series_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The curves of a result."""
    found: dict[tuple[str, str], list[list[float | None]]] = {}

    def add(measure: str, name: str, x: float, y: float | None) -> None:
        found.setdefault((measure, name), []).append([x, y])

    for row in result["validation"]:
        add("loss_by_length", row["set"], row["context"], row.get("loss"))
        label = row["set"] if row["context"] == result["context"] else f"{row['set']}@{row['context']}"
        for bucket in row.get("by_position", []):
            add("loss_by_position", label, bucket["from"], bucket["loss"])
        if row["context"] == result["context"]:
            add("bits_per_byte", row["set"], 0, row.get("bits_per_byte"))
            if row["set"].startswith("pairs_"):
                add("recall_by_pairs", "accuracy", int(row["set"].removeprefix("pairs_")), row.get("accuracy"))
    for probe in dict.fromkeys(cell["probe"] for cell in result["recall"]):
        cells = [cell for cell in result["recall"] if cell["probe"] == probe]
        for length in dict.fromkeys(cell["length"] for cell in cells):
            add("recall_by_length", probe, length, _mean([c.get("exact") for c in cells if c["length"] == length]))
        for cell in cells:
            if cell["depth"] is not None and cell["length"] == result["context"]:
                add("recall_by_depth", probe, cell["depth"], cell.get("exact"))
    for row in result["decoding"]:
        add("decoding_tokens_per_second", "decoding", row["context"], row.get("tokens_per_second"))
        add("prefill_tokens_per_second", "decoding", row["context"], row.get("prefill_tokens_per_second"))
        add("state_bytes", "decoding", row["context"], row["state_bytes"])
    return [{"measure": m, "name": n, "points": points} for (m, n), points in found.items()]


def as_text(result: dict[str, Any]) -> str:
    """The result as tables for a terminal."""
    parts = [f"{result['run']}, step {result['step']}, {result['device']}, {result['precision']}"]
    if result["validation"]:
        parts.append(_validation_table(result["validation"]))
        parts += [_position_table(row) for row in result["validation"] if row.get("by_position")][-1:]
    if result["recall"]:
        parts.append(_recall_table(result["recall"]))
    if result["decoding"]:
        parts.append(_decoding_table(result["decoding"]))
    return "\n\n".join([*parts, *(f"note: {note}" for note in result["notes"])])


def _validation_table(rows: list[dict[str, Any]]) -> str:
    names = ("tokens", "loss", "perplexity", "bits_per_byte", "accuracy")
    head = ("set", "context", "tokens", "loss", "perplexity", "bits a byte", "accuracy")
    cells = [
        (row["set"], f"{row['context']:,}", *(row.get("skipped", "") or _shown(row.get(n)) for n in names))
        for row in rows
    ]
    return in_columns([head, *cells])


def _position_table(row: dict[str, Any]) -> str:
    cells = [
        (f"{b['from']:,}-{b['to']:,}", f"{b['tokens']:,}", _shown(b["loss"]), _shown(b["accuracy"]))
        for b in row["by_position"]
    ]
    title = f"by tokens seen in the document ({row['set']}, rows of {row['context']:,})"
    return f"{title}\n{in_columns([('tokens seen', 'tokens', 'loss', 'accuracy'), *cells])}"


def _recall_table(cells: list[dict[str, Any]]) -> str:
    rows = [("probe", "length", "depth", "samples", "exact", "tokens right", "loss of the answer")]
    for c in cells:
        depth = "any" if c["depth"] is None else f"{c['depth']:.2f}"
        values = [c.get("skipped") or _shown(c.get(name)) for name in ("samples", "exact", "token_accuracy", "loss")]
        rows.append((c["probe"], f"{c['length']:,}", depth, *values))
    return in_columns(rows)


def _decoding_table(rows: list[dict[str, Any]]) -> str:
    names = ("prefill_tokens_per_second", "tokens_per_second", "milliseconds_a_token")
    head = ("tokens before", "rows", "state a row", "read tokens/s", "written tokens/s", "ms a token")
    cells = [
        (f"{r['context']:,}", str(r["batch"]), human_bytes(r["state_bytes"]),
         *(r.get("skipped", "") or _shown(r.get(n)) for n in names))
        for r in rows
    ]  # fmt: skip
    return in_columns([head, *cells])


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _finite(value: Any) -> Any:
    """JSON has no infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
