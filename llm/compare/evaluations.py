"""What `llm.evaluate` left in a run folder: measures as series of points."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "evaluations"


@dataclass(frozen=True)
class Series:
    """One measure of one set or task: points (x, y), in the order of x. `device` is where it was measured."""

    measure: str
    name: str
    points: tuple[tuple[float, float], ...]
    step: int | None = None
    device: str | None = None


def read_evaluations(run_dir: Path) -> tuple[list[Series], list[str]]:
    """All series of a run, and the names of files that could not be read.

    Of the same series the last file counts, in the order of steps and then of evaluations.
    """
    found: dict[tuple[str, str], Series] = {}
    damaged = []
    for path in sorted(run_dir.glob(f"{FOLDER}/[!.]*.json")):
        try:
            for series in _series(json.loads(path.read_bytes())):
                found[series.measure, series.name] = series
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            damaged.append(f"{FOLDER}/{path.name}")
    return list(found.values()), damaged


def _series(content: dict[str, Any]) -> list[Series]:
    step, device = content.get("step"), content.get("device")
    return [
        Series(str(s["measure"]), str(s["name"]), points, step, device)
        for s in content["series"]
        if (points := _points(s["points"]))
    ]


def _points(raw: list[list[float | None]]) -> tuple[tuple[float, float], ...]:
    """Points whose y is a finite number; null stands for what did not fit into memory."""
    return tuple(sorted((float(x), float(y)) for x, y in raw if y is not None and math.isfinite(y)))
