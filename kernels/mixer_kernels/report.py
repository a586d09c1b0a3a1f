"""What a benchmark measured, as a table in Markdown, as JSON and as a plot of time against the length of rows."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from mixer_kernels.bench import Ceilings, Timing

COLUMNS = ("operator", "case", "who", "forward ms", "forward+backward ms", "GPU busy ms", "peak MiB")
COLUMNS += ("floor ms", "first call s")


def environment(limits: Ceilings, peer: str) -> dict[str, str]:
    """Where the figures come from, by what it is."""
    import triton

    return {
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "peer": peer,
        "copy": f"{limits.bandwidth / 1e12:.2f} TB/s",
        "bf16 products": f"{limits.arithmetic / 1e12:.0f} TFLOP/s",
    }


def table(timings: Iterable[Timing]) -> str:
    """One line a timing; floor is what forward and backward take at least, at the rates that this card reached."""
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|", *map(line, timings)])


def line(t: Timing) -> str:
    """A timing as a line of the table."""
    figures = [f"{x:.3f}" for x in (t.forward, t.both, t.busy)] + [f"{t.memory:.0f}"]
    figures += ["" if t.floor is None else f"{t.floor:.3f}", "" if t.first is None else f"{t.first:.1f}"]
    return f"| {' | '.join((t.op, t.case, t.who, *figures))} |"


def kernels(t: Timing) -> str:
    """The same, and microseconds of each kernel."""
    return f"{line(t)} us: " + ", ".join(f"{name} {time:.0f}" for name, time in t.kernels.items())


def save(folder: Path, where: dict[str, str], timings: list[Timing]) -> None:
    """Write table.md, timings.json with all figures, and time_against_length.png if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    said = "\n".join(f"- {what}: {x}" for what, x in where.items())
    (folder / "table.md").write_text(f"{said}\n\n{table(timings)}\n")
    rows = [t._asdict() | {"busy": t.busy} for t in timings]
    (folder / "timings.json").write_text(json.dumps({"environment": where, "timings": rows}, indent=1) + "\n")
    curves = _curves(timings)
    if importlib.util.find_spec("matplotlib") is not None and curves:
        plot(folder / "time_against_length.png", curves)


def plot(path: Path, panels: dict[str, dict[str, dict[int, float]]]) -> None:
    """Nanoseconds a token of forward and backward against T: a panel for each operator and kind, softmax in all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    softmax = panels.get("softmax", {})
    panels = {title: curves for title, curves in panels.items() if title != "softmax"}
    figure = Figure(figsize=(5 * max(1, len(panels)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for who, points in (curves | softmax).items():
            axes.loglog(*zip(*sorted(points.items()), strict=True), marker=".", label=who)
        axes.set(title=title, xlabel="T (tokens a row)", ylabel="forward+backward, ns a token")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(path, dpi=120)


def _curves(timings: Iterable[Timing]) -> dict[str, dict[str, dict[int, float]]]:
    """By operator and kind of case, then by who: nanoseconds a token at each T; what was timed at one T is left out."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for t in timings:
        title = t.op if t.op == "softmax" else f"{t.op}, {t.case.partition(', T ')[0]}"
        found[title][t.who][t.tokens] = 1e6 * t.both / (t.batch * t.tokens)
    several = {title: {who: x for who, x in curves.items() if len(x) > 1} for title, curves in found.items()}
    found = {title: curves for title, curves in several.items() if curves}
    return found if set(found) - {"softmax"} else {}
