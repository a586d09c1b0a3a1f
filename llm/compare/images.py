"""The plots as PNG and SVG for papers, by matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm.compare.plots import COLOURS, Curve, Marks, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPES = ("o", "s", "D", "^", "v")
DASHES = ("-", "--", ":", "-.")
EARLY = 0.15  # share of a curve's x that does not decide the scale of y, as on the page
WIDTH, HEIGHT = 5.5, 3.4  # inches without the legend; a column of a paper
LEGEND_COLUMNS = 2
BESIDE = 0.06  # of a category's width, between series
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mixlab",  # the same plot is the same file
}


def available() -> bool:
    """Is matplotlib installed?"""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def write_images(plots: Sequence[Plot], folder: Path) -> None:
    """ID.png and ID.svg of each plot into an existing folder; of several x axes, the first."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        for plot in plots:
            _write(plot, folder)


def _write(plot: Plot, folder: Path) -> None:
    from matplotlib.figure import Figure

    legend_rows = -(-len(plot.series) // LEGEND_COLUMNS)
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.17 * legend_rows), layout="constrained")
    axes = figure.subplots()
    for i, series in enumerate(plot.series):
        if isinstance(series, Curve):
            _draw_curve(axes, series, next(iter(plot.x_labels)))
        else:
            beside = BESIDE * (i - (len(plot.series) - 1) / 2) if plot.ticks else 0.0
            _draw_marks(axes, series, beside)
    if len(plot.front) > 1:
        axes.plot(*zip(*plot.front, strict=True), color="grey", dashes=(5, 4), linewidth=1, zorder=1)
    _label(axes, plot)
    figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=8)
    figure.savefig(folder / f"{plot.id}.png", dpi=200)
    figure.savefig(folder / f"{plot.id}.svg", metadata={"Date": None})


def _draw_curve(axes: Axes, curve: Curve, axis: str) -> None:
    means, lows, highs = (curve.each(over) for over in (_mean, min, max))
    points = [p for p in zip(curve.xs[axis], means, lows, highs, strict=True) if None not in p]
    if not points:
        return
    xs, ys, low, high = zip(*points, strict=True)
    colour = COLOURS[curve.colour % len(COLOURS)]
    style = ":" if curve.broken else DASHES[curve.colour // len(COLOURS) % len(DASHES)]
    axes.plot(xs, ys, style, color=colour, linewidth=1.4, label=curve.name)
    if len(curve.ys) > 1:
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _draw_marks(axes: Axes, series: Marks, beside: float) -> None:
    """Moved `beside` their place, so that intervals at one place do not cover each other."""
    colour, shape = COLOURS[series.colour % len(COLOURS)], SHAPES[series.colour % len(SHAPES)]
    xs, ys = [mark.x + beside for mark in series.marks], [mark.y for mark in series.marks]
    style = DASHES[series.colour // len(COLOURS) % len(DASHES)] if series.joined else ""
    axes.plot(xs, ys, style, marker=shape, color=colour, markersize=5, linewidth=1.2, label=series.name)
    for x, mark in zip(xs, series.marks, strict=True):
        if mark.interval:
            axes.vlines(x, *mark.interval, color=colour, linewidth=1.2)
        if len(mark.values) > 1:
            axes.plot([x] * len(mark.values), mark.values, ".", color=colour, markersize=3, alpha=0.6)


def _label(axes: Axes, plot: Plot) -> None:
    axes.set_xlabel(next(iter(plot.x_labels.values())))
    axes.set_ylabel(plot.y_label)
    if plot.scale.startswith("log"):
        axes.set_xscale("log", base=2 if plot.scale == "log2" else 10)
    if not plot.ticks:
        write = _binary if plot.scale == "log2" else _decimal
        axes.xaxis.set_major_formatter(lambda value, _: write(value))
    if plot.scale == "log":
        low, high = axes.get_xlim()
        axes.xaxis.set_minor_formatter(lambda value, _: _decimal(value) if high < 10 * low else "")
    if plot.ticks:
        axes.set_xticks(range(len(plot.ticks)), plot.ticks)
        axes.set_xlim(-0.5, len(plot.ticks) - 0.5)
    if plot.smooth:
        _leave_out_the_beginning(axes, plot)


def _decimal(value: float) -> str:
    """12.5k, 3M"""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _binary(value: float) -> str:
    """Contexts as the field writes them: 4k is 4096."""
    return f"{value / 1024:.4g}k" if value >= 1024 else f"{value:.4g}"


def _leave_out_the_beginning(axes: Axes, plot: Plot) -> None:
    """Scale y to what comes after the first steps, or the fall from the first loss hides every difference."""
    axis = next(iter(plot.x_labels))
    last = max(x for curve in plot.series for x in curve.xs[axis] if x is not None)
    values = [
        y
        for curve in plot.series
        for row in curve.ys
        for x, y in zip(curve.xs[axis], row, strict=True)
        if x is not None and y is not None and x >= EARLY * last
    ]
    if values:
        room = 0.05 * (max(values) - min(values) or 1)
        axes.set_ylim(min(values) - room, max(values) + room)
