"""``python -m llm.compare``: see ``--help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llm.cli import command
from llm.compare.analysis import compare
from llm.compare.discover import gather
from llm.compare.figures import build_plots
from llm.compare.tables import as_text, build_tables
from llm.compare.writing import check_target, summary, write_report

SHOWN = ("contenders", "differences", "notes", "unlike", "skipped")  # in the terminal; the report has them all

EXAMPLES = """
  python -m llm.compare runs/ --out report/                 every run below runs/
  python -m llm.compare sweeps/mixers-1a2b3c4d --out report/  the runs of a sweep
  python -m llm.compare runs/ --baseline softmax            all against one: fewer comparisons, narrower intervals
  python -m llm.compare runs/ --select-lr                   each mixer at its best learning rate
  python -m llm.compare --follow runs/                      watch runs that are under way
"""


@command
def main(words: Sequence[str] | None = None) -> int:
    """Compare, or follow, as the command line says. Returns the exit code."""
    options = _parser().parse_args(words)
    if options.follow:
        from llm.compare.follow import follow

        return follow(options.paths, every=options.every, once=options.once)
    if options.out:
        check_target(options.out, force=options.force)  # before the work
    runs, skipped = gather(options.paths)
    comparison = compare(
        runs,
        skipped,
        metric=options.metric,
        baseline=options.baseline,
        select_lr=options.select_lr,
        ignore=options.ignore,
        at=options.at,
    )
    tables = build_tables(comparison)
    if options.out:  # before anything is printed, for which there may be no reader
        plots = build_plots(comparison, options.against)
        write_report(options.out, comparison, tables, plots, options.title, force=options.force)
    print("\n\n".join([summary(comparison), *(as_text(table) for table in tables if table.id in SHOWN)]))
    if options.out:
        print(f"\nreport: {options.out / 'index.html'}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llm.compare",
        description="Compare runs by their folders: a table here, and with --out a report to open in a browser.",
        epilog=f"examples:{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="run folders, sweep folders, or folders that hold some")
    add("--out", type=Path, help="write the report into this folder")
    add("--force", action="store_true", help="replace the report that --out holds")
    add("--title", default="Comparison of runs", help="heading of the report")
    add("--metric", help="what to compare by, as in metrics.jsonl (default: val_loss where there is one)")
    add("--baseline", metavar="LABEL", help="compare all with this contender, instead of all pairs")
    add("--select-lr", action="store_true", help="first choose the best learning rate of each contender")
    add("--at", type=int, metavar="STEP", help="compare as of this step, for instance runs that are still under way")
    add("--ignore", action="append", default=[], metavar="KEY", help="settings that may differ within a contender, "
        "such as 'data.*path' of another machine; * stands for anything; may be repeated")  # fmt: skip
    add("--against", action="append", default=[], metavar="KEY", help="one more plot, with this setting on its x axis")
    add("--follow", action="store_true", help="watch runs that are under way until Ctrl-C")
    add("--every", type=float, default=5.0, metavar="SECONDS", help="time between two looks of --follow")
    add("--once", action="store_true", help="with --follow: look once and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
