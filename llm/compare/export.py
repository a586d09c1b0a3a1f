"""The numbers of a comparison as JSON data and CSV rows, unrounded."""

from __future__ import annotations

from typing import Any

from llm.compare.analysis import Comparison
from llm.compare.fairness import code_version, device, packages
from llm.compare.figures import Plot
from llm.compare.groups import Group
from llm.compare.plots import finite
from llm.compare.records import Run
from llm.compare.tables import as_csv, verdict_text

SCHEMA_VERSION = 1  # of report.json


def as_json(comparison: Comparison, plots: list[Plot]) -> dict[str, Any]:
    """Everything that the report says."""
    return {
        "schema_version": SCHEMA_VERSION,
        "metric": comparison.metric,
        "contenders": [_contender(group, comparison) for group in comparison.groups],
        "differences": difference_rows(comparison),
        "unlike": [{"matter": flag.topic, "values": flag.values} for flag in comparison.flags],
        "remarks": comparison.remarks,
        "skipped": [vars(s) for s in comparison.skipped],
        "runs": run_rows(comparison),
        "plots": [plot.as_json() for plot in plots],
    }


def run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """A row for each run, with the last value of every metric that it logged."""
    return [_run(group, run, comparison.metric) for group in comparison.groups for run in group.all_runs]


def difference_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """A row for each pair of contenders."""
    rows = []
    for v in comparison.verdicts:
        low, high = v.interval or (None, None)
        rows.append(
            {
                "a": v.a.label,
                "b": v.b.label,
                "b_minus_a": v.difference.mean,
                "seeds": v.difference.n,
                "paired": v.difference.paired,
                "level": v.level,
                "low": low,
                "high": high,
                "p": v.difference.p,
                "differs": v.differs,
                "more_seeds": None if v.differs else v.seeds_missing,
                "also_differ_in": "; ".join(v.caveats),
                "verdict": verdict_text(v, comparison.metric),
            }
        )
    return rows


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Dictionaries as CSV; a key that a row lacks is empty."""
    head = list(dict.fromkeys(key for row in rows for key in row))
    return as_csv(head, [["" if row.get(key) is None else row[key] for key in head] for row in rows])


def _contender(group: Group, comparison: Comparison) -> dict[str, Any]:
    found = comparison.estimates.get(group.label)
    return {
        "label": group.label,
        "mixer": group.mixer,
        "family": group.family,
        "softmax_share": group.share,
        "n": found.n if found else 0,
        "mean": found.mean if found else None,
        "interval": found.interval if found else None,
        "values": {f"{pair[0]},{pair[1]}": value for pair, value in group.values(comparison.metric).items()},
        "learning_rates_tried": group.tried,
        "notes": comparison.notes(group),
        "settings": group.settings,
    }


def _run(group: Group, run: Run, metric: str) -> dict[str, Any]:
    facts = {name: value for name, value in run.facts.items() if name != "state_elements"}
    return {
        "contender": group.label,
        "seed": run.pair[0],
        "data_seed": run.pair[1],
        "finished": run.finished,
        "step": run.step,
        "steps": run.steps,
        "resumes": run.resumes,
        f"final_{metric}": finite(run.final(metric)),
        "median_tokens_per_second": run.speed,
        **facts,
        "device": device(run),
        "software": packages(run),
        "code": code_version(run),
        "folder": str(run.path),
        **{name: finite(value) for name, value in run.latest.items() if "/" not in name and name != "step"},
    }
