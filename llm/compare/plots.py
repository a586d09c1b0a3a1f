"""A plot as data: what the page's script and matplotlib both draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

# A colour-blind-safe order (Okabe and Ito 2008, without the yellow, which white paper swallows). Beyond it, dashes and
# shapes of marks tell apart; the page's style sheet has a lighter set for dark screens.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A6A58")


@dataclass(frozen=True)
class Curve:
    """A line of which every seed has a row of `ys` (None: no value there); `xs` are by the name of the x axis.

    A `broken` one is not to be compared, as that of an unfinished run.
    """

    name: str
    colour: int
    xs: dict[str, list[float | None]]
    ys: list[list[float | None]]
    broken: bool = False

    def each(self, over: Callable[[list[float]], float]) -> list[float | None]:
        """min, max or mean over the seeds at each point; None where one of them lacks it."""
        return [None if None in column else over(column) for column in zip(*self.ys, strict=True)]


@dataclass(frozen=True)
class Mark:
    """A mean at `x`, its interval if it has one, and the seeds that it is the mean of."""

    x: float
    values: list[float]
    interval: tuple[float, float] | None
    label: str

    @property
    def y(self) -> float:
        """The mean."""
        return fmean(self.values)


@dataclass(frozen=True)
class Marks:
    """A series of means; `joined` by a line, in the order of x, where that order means something."""

    name: str
    colour: int
    marks: list[Mark]
    joined: bool = False


@dataclass(frozen=True)
class Plot:
    """`series` are all curves or all marks. `x_labels` by the name of the axis: where there are several, one chooses.

    `scale` is that of x: linear, log, log2 (with ticks at powers of two) or category, whose places 0, 1, ... are called
    `ticks`. `front` are the corners of a Pareto front. `note` says what is shown.
    """

    id: str
    title: str
    x_labels: dict[str, str]
    y_label: str
    series: list[Curve] | list[Marks]
    scale: str = "linear"
    ticks: list[str] = field(default_factory=list)
    smooth: bool = False
    front: list[tuple[float, float]] = field(default_factory=list)
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """JSON data for the page, where numbers that are not finite are null."""
        drawn = {"curves": [], "marks": []}
        for series in self.series:
            if isinstance(series, Curve):
                drawn["curves"].append(vars(series) | {"ys": [[finite(y) for y in row] for row in series.ys]})
            else:
                drawn["marks"].append(vars(series) | {"marks": [vars(m) | {"y": m.y} for m in series.marks]})
        return {key: value for key, value in vars(self).items() if key != "series"} | drawn


def finite(value: float | None) -> float | None:
    """None for what is not a finite number."""
    return value if value is not None and math.isfinite(value) else None
