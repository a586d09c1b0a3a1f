"""The plots of a comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from llm.compare.analysis import Comparison
from llm.compare.groups import LR, Group, alike_along, better, labels, plain
from llm.compare.plots import Curve, Mark, Marks, Plot, finite
from llm.compare.records import Run
from llm.compare.statistics import estimate

AXES = {
    "tokens": "tokens",
    "flops": "FLOPs of training",
    "hours": "hours of training, without validation and saving",
    "step": "step",
}
MOST_POINTS = 1500  # of a curve: more than a screen is wide
# a validation set of several: val_pairs_16_accuracy, val_validation@8192_loss
NUMBERED = re.compile(r"val_(?P<name>.+?)(?P<sign>[_@])(?P<number>\d+)_(?P<what>loss|accuracy)")
BAND = "Line: mean over the finished seeds. Band: from the lowest seed to the highest."
BARS = "Small dots: seeds. Bars: 95% t-interval of their mean; a single seed has none."
LABELS = {
    "loss": "training loss, nats a token",
    "val_loss": "validation loss, nats a token",
    "val_accuracy": "validation accuracy",
    "tokens_per_second": "training tokens/s",
    "state_bytes": "decoding state after a row of context, bytes a sequence",
    LR: "peak learning rate",
    "context": "tokens a row, T",
}
BY = {  # what a measure named ..._by_... goes by: label and scale of x
    "length": ("tokens of context", "log2"),
    "position": ("tokens seen in the document", "log2"),
    "depth": ("depth in the context, as a share of it", "linear"),
    "pairs": ("pairs", "log2"),
    "": ("tokens of context", "log2"),
}


def build_plots(comparison: Comparison, against: Sequence[str] = ()) -> list[Plot]:
    """Every plot for which there are data; `against` are settings, each for the x axis of one more."""
    groups, metric = comparison.groups, comparison.metric
    plots = [
        *(curves(name, groups) for name in _curve_names(groups, metric)),
        *(against_ratio(name, groups) for name in dict.fromkeys([metric, *_recall_names(groups)])),
        pareto("tokens_per_second", metric, groups),
        pareto("state_bytes", metric, groups),
        *_by_number(groups),
        *_measured(groups),
        against_setting(LR, metric, comparison.candidates),
        against_setting("context", "tokens_per_second", groups),
        *(against_setting(key, metric, groups) for key in against if key != LR),
    ]
    return _with_safe_ids([plot for plot in plots if plot.series])


def _with_safe_ids(plots: Sequence[Plot]) -> list[Plot]:
    """Ids become names of files, and parts of them come from run folders: only letters, digits, - and _, each once."""
    taken: dict[str, Plot] = {}
    for plot in plots:
        safe = re.sub(r"[^a-zA-Z0-9_-]+", "_", plot.id)
        while safe in taken:
            safe += "_"
        taken[safe] = replace(plot, id=safe)
    return list(taken.values())


def describe(metric: str) -> str:
    """A metric or setting in words."""
    return LABELS.get(metric, metric.replace("_", " "))


def _title(metric: str) -> str:
    """Without its unit, as a heading."""
    words = describe(metric).partition(",")[0]
    return words[:1].upper() + words[1:]


def curves(metric: str, groups: Sequence[Group]) -> Plot:
    """A metric as training goes: a curve for each contender over its finished seeds; unfinished runs by themselves."""
    series = []
    for colour, group in enumerate(groups):
        series.append(_curve(metric, group.label, colour, list(group.runs.values())))
        for run in group.unfinished:
            name = f"{group.label}, seed {run.pair[0]}, unfinished"
            series.append(_curve(metric, name, colour, [run], broken=True))
    series = [curve for curve in series if curve is not None]
    axes = {axis: text for axis, text in AXES.items() if any(None not in curve.xs[axis] for curve in series)}
    return Plot(f"curve-{metric}", _title(metric), axes, describe(metric), series, smooth=True, note=BAND)


def _curve_names(groups: Sequence[Group], metric: str) -> list[str]:
    """Training loss, every validation loss (of several sets and lengths), and what is compared."""
    logged = dict.fromkeys(name for group in groups for run in group.all_runs for name in run.latest)
    validated = [n for n in logged if n.startswith("val") and n.endswith("_loss") and not NUMBERED.fullmatch(n)]
    names = dict.fromkeys(["loss", *validated, metric])
    return [name for name in names if name in logged and name != "tokens_per_second"]


def _curve(metric: str, name: str, colour: int, runs: Sequence[Run], *, broken: bool = False) -> Curve | None:
    """Over the steps that all the runs logged, thinned to what a screen can show."""
    tables = [{line["step"]: line[metric] for line in run.metrics if metric in line} for run in runs]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    if not steps:
        return None
    steps = sorted({*steps[:: -(-len(steps) // MOST_POINTS)], steps[-1]})
    ys = [[finite(table[step]) for step in steps] for table in tables]
    return Curve(name, colour, {axis: _axis(axis, steps, runs) for axis in AXES}, ys, broken)


def _axis(axis: str, steps: Sequence[int], runs: Sequence[Run]) -> list[float | None]:
    """The x of each step, averaged over the runs: seeds differ in nothing but the hours."""
    tables = [dict(zip(run.axis("step"), run.axis(axis), strict=True)) for run in runs]
    rows = ([table[step] for table in tables] for step in steps)
    return [None if None in row else fmean(row) for row in rows]


def against_ratio(metric: str, groups: Sequence[Group]) -> Plot:
    """The final value against the share of softmax layers, joined for each linear mixer."""
    measured = [group for group in groups if group.values(metric)]
    ratios = dict(sorted({(group.share, group.ratio) for group in measured}))
    places = {share: i for i, share in enumerate(ratios)}
    families: dict[str, list[Group]] = {}
    for group in measured:
        families.setdefault(group.family or group.ratio, []).append(group)
    series = [  # in the colour that the first of them has elsewhere
        _marks(name, groups.index(members[0]), metric, {id(g): places[g.share] for g in members}, members)
        for name, members in families.items()
    ]
    return Plot(
        f"ratio-{metric}",
        f"{_title(metric)} at the end against the hybrid ratio",
        {"x": "linear layers to each softmax layer"},
        describe(metric),
        series if len(ratios) > 1 else [],
        scale="category",
        ticks=list(ratios.values()),
        note=BARS,
    )


def against_setting(key: str, metric: str, groups: Sequence[Group]) -> Plot:
    """The final value against a setting, joined for contenders that differ in that setting alone."""
    measured = [group for group in groups if key in group.settings and group.values(metric)]
    values = list({repr(group.settings[key]): group.settings[key] for group in measured}.values())
    numbers = all(isinstance(v, int | float) and v > 0 for v in values)
    values.sort(key=lambda v: (0, v) if isinstance(v, int | float) else (1, repr(v)))
    places = {repr(v): v if numbers else i for i, v in enumerate(values)}
    sets = alike_along(key, measured)
    firsts = [alike[0] for alike in sets]
    names = labels(firsts, without=(key,))
    series = [
        _marks(name, colour, metric, {id(g): places[repr(g.settings[key])] for g in alike}, alike)
        for colour, (name, alike) in enumerate(zip(names, sets, strict=True))
    ]
    return Plot(
        f"{metric}-against-{key}",
        f"{_title(metric)} at the end against {describe(key)}",
        {"x": describe(key)},
        describe(metric),
        series if len(values) > 1 else [],
        scale=("log2" if key == "context" else "log") if numbers else "category",
        ticks=[] if numbers else [plain(v) for v in values],
        note=BARS,
    )


def _marks(name: str, colour: int, metric: str, places: dict[int, float], members: Sequence[Group]) -> Marks:
    """The final values of `members` at their places, joined where no two have the same place."""
    found = sorted((_mark(places[id(g)], metric, g) for g in members), key=lambda mark: mark.x)
    return Marks(name, colour, found, joined=len(set(places.values())) == len(members))


def _mark(x: float, metric: str, group: Group) -> Mark:
    values = list(group.values(metric).values())
    return Mark(x, values, estimate(values).interval, group.label)


def pareto(cost: str, metric: str, groups: Sequence[Group]) -> Plot:
    """Quality against throughput (more is better) or bytes of state (less is better), and the front."""
    series, means = [], []
    for colour, group in enumerate(groups):
        x, values = _cost(cost, group), group.values(metric)
        if x is not None and values:
            mark = _mark(x, metric, group)
            series.append(Marks(group.label, colour, [mark]))
            means.append((x, mark.y))
    return Plot(
        f"pareto-{cost}",
        f"{_title(metric)} at the end against {describe(cost).partition(',')[0]}",
        {"x": describe(cost)},
        describe(metric),
        series if len(series) > 1 else [],
        scale="log",
        front=_front(means, 1 if cost == "tokens_per_second" else -1, better(metric)),
        note=f"{BARS} Dashed: contenders that no other beats in both (by their means).",
    )


def _cost(cost: str, group: Group) -> float | None:
    runs = group.runs.values()
    found = [run.speed if cost == "tokens_per_second" else run.facts.get(cost) for run in runs]
    return fmean(found) if found and None not in found else None


def _front(points: Sequence[tuple[float, float]], x_sign: int, y_sign: int) -> list[tuple[float, float]]:
    """The points that none beats in both coordinates, in the order of x; a sign of 1 where more is better."""
    beaten = lambda p: any(  # noqa: E731
        q != p and q[0] * x_sign >= p[0] * x_sign and q[1] * y_sign >= p[1] * y_sign for q in points
    )
    return sorted({p for p in points if not beaten(p)})


def _recall_names(groups: Sequence[Group]) -> list[str]:
    """Final metrics that say how much is recalled."""
    logged = dict.fromkeys(name for group in groups for run in group.all_runs for name in run.latest)
    single = dict.fromkeys(s.measure for g in groups for r in g.all_runs for s in r.evaluations if len(s.points) == 1)
    return [name for name in (*logged, *single) if "recall" in name or name == "val_accuracy"]


def _by_number(groups: Sequence[Group]) -> list[Plot]:
    """Final losses and accuracies of validation sets that differ by a number, against that number."""
    logged = dict.fromkeys(name for group in groups for run in group.runs.values() for name in run.latest)
    families: dict[tuple[str, str, str], dict[int, str]] = {}
    for match in filter(None, map(NUMBERED.fullmatch, logged)):
        family = families.setdefault((match["name"], match["sign"], match["what"]), {})
        family[int(match["number"])] = match[0]
    plots = []
    for (name, sign, what), metrics in families.items():
        label = BY["length"][0] if sign == "@" else name.replace("_", " ")
        y_label = "loss, nats a token" if what == "loss" else what
        title = f"{y_label.partition(',')[0].capitalize()} at the end against {label}"
        series = [_numbered_curve(group, colour, metrics) for colour, group in enumerate(groups)]
        plots.append(
            Plot(f"{what}-by-{name}", title, {"x": label}, y_label, [c for c in series if c], scale="log2", note=BAND)
        )
    return plots


def _numbered_curve(group: Group, colour: int, metrics: dict[int, str]) -> Curve | None:
    """Over the numbers for which every finished run of the group has a value."""
    rows = [{n: run.final(metric) for n, metric in metrics.items()} for run in group.runs.values()]
    numbers = sorted(n for n in metrics if n > 0 and rows and all(row[n] is not None for row in rows))
    if not numbers:
        return None
    return Curve(group.label, colour, {"x": numbers}, [[finite(row[n]) for n in numbers] for row in rows])


def _measured(groups: Sequence[Group]) -> list[Plot]:
    """What `llm.evaluate` measured as a function of something: a plot for each measure and set."""
    kinds = dict.fromkeys(
        (s.measure, s.name) for g in groups for run in g.runs.values() for s in run.evaluations if len(s.points) > 1
    )
    return [_measured_plot(measure, name, groups) for measure, name in kinds]


def _measured_plot(measure: str, name: str, groups: Sequence[Group]) -> Plot:
    curves = []
    for colour, group in enumerate(groups):
        found = [s for run in group.runs.values() for s in run.evaluations if (s.measure, s.name) == (measure, name)]
        tables = [dict(series.points) for series in found]
        xs = sorted(set.intersection(*map(set, tables))) if tables else []
        if xs:
            curves.append(Curve(group.label, colour, {"x": xs}, [[table[x] for x in xs] for table in tables]))
    what, _, axis = measure.partition("_by_")
    label, scale = BY.get(axis, (axis.replace("_", " "), "linear"))
    if any(x <= 0 for curve in curves for x in curve.xs["x"]):
        scale = "linear"
    y_label = "loss, nats a token" if what == "loss" else what.replace("_", " ")
    title = f"{y_label.partition(',')[0]} against {label}: {name}"
    return Plot(
        f"{measure}-{name}", title[:1].upper() + title[1:], {"x": label}, y_label, curves, scale=scale, note=BAND
    )
