"""Accuracy against the number of pairs: a table and a plot from the runs of ``-m sweep=mqar``.

python scripts/plot_recall.py SWEEP --out docs/results/mqar.svg

Each mixer at each state size is taken at its best learning rate: the one with the highest mean accuracy over seeds and
numbers of pairs, after the last validation. Prints a markdown table: the mean over the seeds, and in brackets the
lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from llm.cli import command
from llm.compare.discover import find, read_all
from llm.compare.records import Run
from llm.errors import UserError

Key = tuple[str, int]  # mixer, state elements of a linear layer (0: none)
Cell = dict[int, list[float]]  # pairs -> accuracy of each seed


def accuracies(run: Run) -> dict[int, float]:
    """The newest accuracy at each number of pairs."""
    found = {name: re.fullmatch(r"val_pairs_(\d+)_accuracy", name) for name in run.latest}
    return {int(match[1]): run.latest[name] for name, match in found.items() if match}


def key_of(run: Run) -> Key:
    """What the run stands for."""
    sizes = run.config.model
    return run.mixer, 0 if run.mixer == "softmax" else sizes.d_model * sizes.linear_head_dim


def best_cells(runs: list[Run]) -> dict[Key, tuple[float, Cell]]:
    """For each mixer and state size its best learning rate and, there, the accuracies of all seeds."""
    found: dict[Key, dict[float, Cell]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for run in runs:
        for pairs, accuracy in accuracies(run).items():
            found[key_of(run)][run.config.optim.lr][pairs].append(accuracy)
    score = lambda cell: mean(mean(seeds) for seeds in cell.values())  # noqa: E731
    return {key: max(cells.items(), key=lambda item: score(item[1])) for key, cells in sorted(found.items())}


def as_markdown(cells: dict[Key, tuple[float, Cell]]) -> str:
    """One row for each mixer and state size."""
    pairs = sorted({n for _, cell in cells.values() for n in cell})
    lines = ["| mixer | state of a layer | best lr | seeds | " + " | ".join(f"{n} pairs" for n in pairs) + " |"]
    lines.append("| --- " * (4 + len(pairs)) + "|")
    for (mixer, state), (lr, cell) in cells.items():
        shown = [f"{mean(cell[n]):.2f} ({min(cell[n]):.2f}-{max(cell[n]):.2f})" for n in pairs]
        seeds = len(cell[pairs[0]])
        lines.append(f"| {mixer} | {state or 'all tokens'} | {lr:g} | {seeds} | {' | '.join(shown)} |")
    return "\n".join(lines)


def plot(cells: dict[Key, tuple[float, Cell]], out: Path) -> None:
    """A panel for each state size; softmax attention in all of them."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mixlab"  # the same figures give the same file
    from matplotlib import pyplot

    states = sorted({state for _, state in cells if state})
    figure, axes = pyplot.subplots(1, len(states), figsize=(4.6 * len(states), 3.8), sharey=True, squeeze=False)
    colours = {mixer: f"C{i % 10}" for i, mixer in enumerate(dict.fromkeys(mixer for mixer, _ in cells))}
    for axis, state in zip(axes[0], states, strict=True):
        for (mixer, own), (_, cell) in cells.items():
            if own not in (0, state):
                continue
            pairs, style = sorted(cell), "--" if mixer.startswith("hybrid") else "-"
            axis.plot(pairs, [mean(cell[n]) for n in pairs], style, marker="o", ms=3, color=colours[mixer], label=mixer)
            low, high = ([limit(cell[n]) for n in pairs] for limit in (min, max))
            axis.fill_between(pairs, low, high, color=colours[mixer], alpha=0.15, lw=0)
        axis.set(
            xscale="log", xlabel="pairs to recall", title=f"state of a layer: {state:,} elements", ylim=(-0.02, 1.02)
        )
        axis.set_xticks(pairs, [str(n) for n in pairs])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy")
    axes[0][-1].legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


@command
def main() -> None:
    """Print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="+", help="sweep folders, run folders, or folders of them")
    parser.add_argument("--out", type=Path, help="image to write, for instance mqar.svg or mqar.png")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    folders, absent = find(options.paths)
    runs, unreadable = read_all(folders)
    for skipped in [*absent, *unreadable]:
        print(f"left out: {skipped.path}: {skipped.reason}", file=sys.stderr)
    cells = best_cells([run for run in runs if accuracies(run)])
    if not cells:
        raise UserError(f"{options.paths}: no run has an accuracy by number of pairs. Train -m sweep=mqar.")
    print(as_markdown(cells))
    if options.out:
        plot(cells, options.out)
    if options.json:
        rows = [{"mixer": m, "state": s, "lr": lr, "accuracy": cell} for (m, s), (lr, cell) in cells.items()]
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main())
