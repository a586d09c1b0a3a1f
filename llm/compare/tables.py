"""The tables of a comparison, and a table as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from llm.compare.analysis import Comparison, Verdict
from llm.compare.fairness import code_version, device, packages
from llm.compare.groups import Group, better, differing_keys, plain
from llm.compare.statistics import ALPHA, CONFIDENCE, Estimate


@dataclass(frozen=True)
class Table:
    """Cells as text under a head; the first column names the row. `id` is for file names."""

    id: str
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def build_tables(comparison: Comparison) -> list[Table]:
    """Every table that has rows."""
    tables = [
        contenders(comparison),
        differences(comparison),
        notes(comparison),
        unlike(comparison),
        skipped(comparison),
        settings(comparison),
        runs(comparison),
    ]
    return [table for table in tables if table.rows]


def contenders(comparison: Comparison) -> Table:
    """A row for each contender: what was measured, with intervals, and what it costs."""
    metric = comparison.metric
    as_perplexity = metric.endswith("loss")
    head = ["contender", "seeds", metric, *(["perplexity"] if as_perplexity else []), "tokens/s", "parameters", "state"]
    rows = []
    for group in comparison.groups:
        found = comparison.estimates.get(group.label)
        row = [group.label, _seed_count(group, found), _estimate(found)]
        row += [_perplexity(found)] if as_perplexity else []
        row += [_speed(group), _fact(group, "non_embedding_parameters"), _bytes(_one(group, "state_bytes"))]
        rows.append([*row, plain(group.lr), ", ".join(comparison.apart(group))])
    note = (
        f"{metric} {_when(comparison)}: mean over the finished seeds ± half of its {CONFIDENCE:.0%} t-interval. "
        "Parameters without embedding and head; state: bytes of decoding one sequence after a row of context."
    )
    return Table("contenders", "Contenders", [*head, "lr", f"unlike {comparison.reference.label} in"], rows, note)


def _when(comparison: Comparison) -> str:
    return "after the last step" if comparison.at is None else f"after step {comparison.at:,}, not the last"


def differences(comparison: Comparison) -> Table:
    """A row for each pair that can be tested: the difference, its corrected interval and what follows."""
    tested = sorted((v for v in comparison.verdicts if v.difference.p is not None), key=lambda v: v.difference.p)
    rows = [
        [
            f"{v.b.label} - {v.a.label}",
            _seeds_of(v),
            f"{v.difference.mean:+.4f}",
            _interval(v.interval),
            f"{v.difference.p:.2g}",
            verdict_text(v, comparison.metric),
        ]
        for v in tested
    ]
    head = ["difference", "seeds", "mean", "corrected interval", "p", "verdict"]
    return Table("differences", "Differences", head, rows, _note_on_differences(comparison, len(tested)))


def _note_on_differences(comparison: Comparison, tested: int) -> str:
    untested = len(comparison.verdicts) - tested
    parts = [
        f"{comparison.metric}; runs are paired by seed where data and their order are the same. Intervals are widened "
        f"by Holm's method, so that all {tested} together err with a chance of {ALPHA:.0%} at most; p is not "
        "corrected. A difference is called one only where its interval excludes zero."
    ]
    if untested:
        parts.append(f"{untested} more pairs have a single seed in common, which tells nothing of the spread.")
    return " ".join(parts)


def _seeds_of(verdict: Verdict) -> str:
    n = verdict.difference.n
    if not verdict.difference.paired:
        return f"{n} a side, unpaired"
    return f"{n} pair{'s' if n > 1 else ''}"


def verdict_text(verdict: Verdict, metric: str) -> str:
    """What follows from a difference, with what else sets the two apart."""
    also = f"; but they also differ in {', '.join(verdict.caveats)}" if verdict.caveats else ""
    if verdict.difference.p is None:
        return f"cannot be told from {verdict.difference.n} seed{also}"
    if verdict.differs:
        good = verdict.difference.mean * better(metric) > 0
        return f"{(verdict.b if good else verdict.a).label} is better{also}"
    if verdict.seeds_missing is None:
        return f"no difference shown; no practical number of seeds would settle one so small{also}"
    each = "" if verdict.difference.paired else " on each side"
    seeds = f"{verdict.seeds_missing} more seed{'s' if verdict.seeds_missing > 1 else ''}{each}"
    return f"no difference shown; about {seeds} would settle one of this size{also}"


def notes(comparison: Comparison) -> Table:
    """What has to be said beside the numbers."""
    rows = [[group.label, note] for group in comparison.groups for note in comparison.notes(group)]
    return Table("notes", "Notes", ["contender", "note"], [*rows, *(["(all)", text] for text in comparison.remarks)])


def unlike(comparison: Comparison) -> Table:
    """Matters that are not the same in all, though the comparison takes them to be."""
    everyone = len(comparison.groups)
    rows = [
        [flag.topic, value, "all" if len(labels) == everyone else ", ".join(labels)]
        for flag in comparison.flags
        for value, labels in flag.values.items()
    ]
    note = "Contenders differ in these beyond their mixers: weigh differences between them accordingly."
    return Table("unlike", "Not the same in all", ["matter", "value", "contenders"], rows, note)


def skipped(comparison: Comparison) -> Table:
    """Folders that take no part."""
    rows = [[s.path, s.reason] for s in comparison.skipped]
    return Table("skipped", "Left out", ["folder", "why"], rows)


def settings(comparison: Comparison) -> Table:
    """Settings in which the contenders differ, and only those."""
    keys = differing_keys(group.settings for group in comparison.groups)
    rows = [[key, *(plain(group.settings.get(key, "-")) for group in comparison.groups)] for key in keys]
    return Table("settings", "Settings that differ", ["setting", *(g.label for g in comparison.groups)], rows)


def runs(comparison: Comparison) -> Table:
    """A row for each run: its end, and where it ran."""
    rows = []
    for group in comparison.groups:
        for run in group.all_runs:
            value = run.final(comparison.metric)
            state = "finished" if run.finished else f"step {run.step:,} of {run.steps:,}"
            shown = "-" if value is None else number(value)
            first = run.starts[0].get("started", "-") if run.starts else "-"
            cells = [str(run.pair[0]), str(run.pair[1]), shown, state, str(run.resumes)]
            where = [device(run), packages(run), code_version(run), str(first), str(run.path)]
            rows.append([group.label, *cells, *where])
    head = ["contender", "seed", "data seed", comparison.metric, "state", "resumes"]
    where = ["device", "software", "code", "started", "folder"]
    return Table("runs", "Runs and where they ran", [*head, *where], rows)


def number(value: float) -> str:
    """Four decimals, none where they mean nothing."""
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "-"
    return number(found.mean) + (" (one seed)" if found.half_width is None else f" ± {number(found.half_width)}")


def _perplexity(found: Estimate | None) -> str:
    return "-" if found is None else f"{math.exp(min(found.mean, 700)):.2f}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "none" if ends is None else f"{ends[0]:+.4f} to {ends[1]:+.4f}"


def _seed_count(group: Group, found: Estimate | None) -> str:
    n, begun = found.n if found else 0, len(group.all_runs)
    return str(n) if n == begun else f"{n} of {begun}"


def _speed(group: Group) -> str:
    rates = [run.speed for run in group.runs.values() if run.speed is not None]
    return f"{fmean(rates):,.0f}" if rates else "-"


def _one(group: Group, name: str) -> float | None:
    """A fact of the model, the same in all runs of a contender."""
    return next((run.facts[name] for run in group.all_runs if name in run.facts), None)


def _fact(group: Group, name: str) -> str:
    value = _one(group, name)
    return "-" if value is None else f"{value:,}"


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def as_text(table: Table) -> str:
    """Aligned columns for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(table.head))]
    shown = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in lines]
    rule = "  ".join("-" * w for w in widths)
    return "\n".join([table.title, "", shown[0], rule, *shown[1:], *(["", table.note] if table.note else [])])


def as_markdown(table: Table) -> str:
    """A section with a pipe table."""
    row = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"  # noqa: E731
    lines = [row(table.head), row(["---"] * len(table.head)), *map(row, table.rows)]
    return "\n".join([f"## {table.title}", "", *lines, *(["", table.note] if table.note else []), ""])


def as_csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Comma-separated, quoted where needed."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([head, *rows])
    return stream.getvalue()


def as_latex(table: Table) -> str:
    """A tabular in booktabs style: \\usepackage{booktabs}."""
    row = lambda cells: " & ".join(map(_latex, cells)) + r" \\"  # noqa: E731
    body = [r"\toprule", row(table.head), r"\midrule", *map(row, table.rows), r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(table.head)}}}", *body, r"\end{tabular}", ""])


_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {c: "\\" + c for c in "&%$#_{}"}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
