"""The report folder: written aside, then renamed, so that it is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from llm.compare import images
from llm.compare.analysis import Comparison
from llm.compare.export import as_json, csv_of, difference_rows, run_rows
from llm.compare.page import as_html
from llm.compare.plots import Plot
from llm.compare.tables import Table, as_csv, as_latex, as_markdown
from llm.durable import TEMPORARY, sync, write_file
from llm.errors import UserError

MARK = "report.json"  # what makes a folder a report, which --force may replace


def check_target(out: Path, *, force: bool) -> None:
    """UserError where `out` is taken: by anything but a report, or by a report that `force` does not give up."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file()):
        raise UserError(f"--out {out}: this is there, and is no report. Choose another folder.")
    if (out / MARK).is_file() and not force:
        raise UserError(f"--out {out}: there is a report already. Choose another folder, or replace it with --force.")


def write_report(
    out: Path, comparison: Comparison, tables: list[Table], plots: list[Plot], title: str, *, force: bool = False
) -> None:
    """Everything into `out`: index.html, report.{md,tex,json}, CSV tables, and images of the plots."""
    check_target(out, force=force)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = out.absolute().with_name(f"{TEMPORARY}{out.absolute().name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        _fill(aside, comparison, tables, plots, title)
        _move(aside, out.absolute())
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(folder: Path, comparison: Comparison, tables: list[Table], plots: list[Plot], title: str) -> None:
    data = as_json(comparison, plots)
    text = {
        "index.html": as_html(title, summary(comparison), tables, {"plots": data["plots"]}),
        "report.md": "\n".join([f"# {title}", "", summary(comparison), "", *map(as_markdown, tables)]),
        "report.tex": "\n".join(as_latex(t) for t in tables if t.id in ("contenders", "differences")),
        MARK: json.dumps(data, indent=1, allow_nan=False, default=str),
        "runs.csv": csv_of(run_rows(comparison)),
        "differences.csv": csv_of(difference_rows(comparison)),
        **{f"{t.id}.csv": as_csv(t.head, t.rows) for t in tables if t.id in ("contenders", "unlike", "settings")},
    }
    for name, content in text.items():
        write_file(folder / name, content.encode())
    if images.available():
        (folder / "plots").mkdir()
        images.write_images(plots, folder / "plots")
    else:
        print("note: no images of the plots without matplotlib (pip install 'mixlab[bench]')", file=sys.stderr)
    sync(folder)


def summary(comparison: Comparison) -> str:
    """One sentence on what was compared."""
    finished = sum(len(group.runs) for group in comparison.groups)
    unfinished = sum(len(group.unfinished) for group in comparison.groups)
    more = f", {unfinished} unfinished" if unfinished else ""
    left_out = f"; folders left out: {len(comparison.skipped)}" if comparison.skipped else ""
    found = sum(verdict.differs for verdict in comparison.verdicts)
    return (
        f"{len(comparison.groups)} contenders, {finished} finished runs{more}{left_out}. "
        f"Compared by {comparison.metric}: {found} of {len(comparison.verdicts)} differences can be told from chance."
    )


def _move(aside: Path, out: Path) -> None:
    """Rename `aside` to `out`; a report that is there steps back first and goes when the new one is in place."""
    old = out.with_name(f"{TEMPORARY}replaced-{out.name}-{os.getpid()}")
    if out.exists():
        os.rename(out, old)
    os.rename(aside, out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)
