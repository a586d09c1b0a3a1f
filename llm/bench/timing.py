"""What a benchmark of training steps finds out, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WARMUP = 8  # steps behind the first that are not timed: allocations, libraries that try their kernels, clocks
COLUMNS = ("model", "parameters", "context", "rows", "", "ms", "tokens/s", "MFU", "GiB", "first step s", "graphs")


@dataclass
class Timing:
    """A model's training step: times in milliseconds (the first one in seconds), memory in GiB.

    `mfu` counts the model's own products against the dense bf16 peak of the device, documents by their lengths; None
    where the peak or the products are not known. `graphs` were compiled in the first step, `later_graphs` behind it.
    `split` is what parts of the step take alone. `failed` says why there is nothing of all this.
    """

    name: str
    context: int
    packed: bool
    parameters: int = 0
    rows: int = 0
    milliseconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float | None = None
    memory: float = 0.0
    first_step: float = 0.0
    graphs: int = 0
    later_graphs: int = 0
    loss: float = 0.0
    split: dict[str, float] = field(default_factory=dict)
    failed: str = ""


def table(timings: Sequence[Timing]) -> str:
    """A line a timing, in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, timings)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cells(t: Timing) -> list[str]:
    kind = "packed" if t.packed else "whole rows"
    if t.failed:
        return [t.name, "", str(t.context), "", kind, t.failed, *[""] * 5]
    return [
        t.name, f"{t.parameters / 1e6:.1f}M", str(t.context), str(t.rows), kind, f"{t.milliseconds:.1f}",
        f"{t.tokens_per_second / 1000:.1f}k", "" if t.mfu is None else f"{t.mfu:.1%}", f"{t.memory:.1f}",
        f"{t.first_step:.1f}", f"{t.graphs}" + (f" + {t.later_graphs} later" if t.later_graphs else ""),
    ]  # fmt: skip


def split_table(timings: Sequence[Timing]) -> str:
    """Milliseconds of the parts of each step, in Markdown; empty where nothing was split."""
    rows = [t for t in timings if t.split]
    if not rows:
        return ""
    parts = list(dict.fromkeys(part for t in rows for part in t.split))
    head = ["model", "context", "step ms", *parts]
    cells = [
        [t.name, str(t.context), f"{t.milliseconds:.1f}", *(f"{t.split.get(p, 0):.1f}" for p in parts)] for t in rows
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *cells])


def plot(timings: Sequence[Timing], path: Path) -> None:
    """Tokens a second against the context, a line a model; where there is one context, bars."""
    import matplotlib.pyplot as plt

    lines: dict[str, list[Timing]] = {}
    for timing in timings:
        if not timing.failed:
            lines.setdefault(timing.name + (", packed" if timing.packed else ""), []).append(timing)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if len({t.context for t in timings}) > 1:
        for name, points in lines.items():
            axes.plot([t.context for t in points], [t.tokens_per_second / 1000 for t in points], marker="o", label=name)
        axes.set(xscale="log", xlabel="tokens a row", ylabel="thousand tokens a second", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    else:
        names = list(lines)[::-1]
        axes.barh(names, [lines[name][0].tokens_per_second / 1000 for name in names])
        axes.set(xlabel="thousand tokens a second")
    figure.savefig(path, dpi=150)
    plt.close(figure)
