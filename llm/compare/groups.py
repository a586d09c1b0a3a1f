"""Contenders: runs that agree in everything but their seeds, under a name that tells them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from statistics import fmean
from typing import Any

from llm.compare.records import Run
from llm.errors import UserError
from llm.layout import layer_names

SEEDS = ("seed", "data.seed")
LR = "optim.lr"
LENGTH = ("steps", "tokens")
HIGHER_IS_BETTER = ("accuracy", "recall", "tokens_per_second", "mfu")


@dataclass
class Group:
    """A contender. `runs` are its finished runs, by pair of seeds; `unfinished` the others.

    `family` is its linear mixer ("" for softmax layers alone), `share` the share of softmax layers, `ratio` how that is
    written: pure, 3:1, softmax. `tried` are the learning rates of which this one was chosen.
    """

    label: str
    settings: dict[str, Any]
    runs: dict[tuple[int, int], Run]
    unfinished: list[Run]
    family: str
    share: float
    ratio: str
    tried: list[float] = field(default_factory=list)

    @property
    def all_runs(self) -> list[Run]:
        """Finished and unfinished ones."""
        return [*self.runs.values(), *self.unfinished]

    @property
    def mixer(self) -> str:
        """Of its layers, for instance hybrid_gdn_3to1."""
        return self.all_runs[0].mixer

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.settings[LR]

    def values(self, metric: str) -> dict[tuple[int, int], float]:
        """The final value of a metric in the finished runs that have it, by pair of seeds."""
        found = {pair: run.final(metric) for pair, run in self.runs.items()}
        return {pair: value for pair, value in found.items() if value is not None}


def better(metric: str) -> int:
    """+1 where a higher value of the metric is better, -1 where a lower one is."""
    return 1 if any(word in metric for word in HIGHER_IS_BETTER) else -1


def group_runs(runs: Sequence[Run], ignore: Sequence[str] = ()) -> list[Group]:
    """Groups in the order of family and share of softmax layers. Keys that match a pattern of `ignore` may differ."""
    by_settings: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_settings[_fingerprint(run.settings, (*SEEDS, *ignore))].append(run)
    groups = [_group(members) for members in by_settings.values()]
    groups.sort(key=lambda g: (g.share == 1, g.family, g.share, g.lr))
    name_groups(groups)
    return groups


def _group(members: list[Run]) -> Group:
    finished: dict[tuple[int, int], Run] = {}
    unfinished = []
    for run in sorted(members, key=lambda r: (r.pair, not r.finished)):
        if run.finished and run.pair not in finished:
            finished[run.pair] = run
        else:
            unfinished.append(run)
    family, share, ratio = _layout(members[0])
    settings = {key: value for key, value in members[0].settings.items() if key not in SEEDS}
    return Group("", settings, finished, unfinished, family, share, ratio)


def _layout(run: Run) -> tuple[str, float, str]:
    """Family, share of softmax layers, and the ratio as people write it."""
    names = layer_names(run.config)
    softmax = names.count(run.config.hybrid.softmax)
    linear = len(names) - softmax
    family = "+".join(sorted(set(names) - {run.config.hybrid.softmax}))
    if not linear or not softmax:
        return family, softmax / len(names), "pure" if linear else run.config.hybrid.softmax
    ratio = f"{linear / softmax:.3g}:1" if linear >= softmax else f"1:{softmax / linear:.3g}"
    return family, softmax / len(names), ratio


def name_groups(groups: Sequence[Group]) -> None:
    """Give each a label that no other has."""
    for group, label in zip(groups, labels(groups), strict=True):
        group.label = label


def labels(groups: Sequence[Group], without: Sequence[str] = ()) -> list[str]:
    """Each group's mixer and, where several have that, the settings in which those differ, but for keys `without`."""
    by_mixer: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_mixer[group.mixer].append(group)
    keys = {mixer: _telling_keys(alike, without) for mixer, alike in by_mixer.items()}
    several_sizes = len({group.settings["model.name"] for group in groups}) > 1
    return [
        " ".join(
            [
                *([group.settings["model.name"]] if several_sizes else []),
                group.mixer,
                *(f"{_short(key, keys[group.mixer])}={plain(group.settings.get(key))}" for key in keys[group.mixer]),
            ]
        )
        for group in groups
    ]


def _telling_keys(alike: Sequence[Group], without: Sequence[str]) -> list[str]:
    keys = [key for key in differing_keys(group.settings for group in alike) if key not in without]
    if "model.name" in keys:  # says more than the sizes behind it
        keys = [key for key in keys if not key.startswith("model.")]
    told: dict[tuple[int, ...], str] = {}  # of keys that tell the same ones apart, one is enough
    for key in keys:
        values = [repr(group.settings.get(key)) for group in alike]
        told.setdefault(tuple(map(values.index, values)), key)
    return list(told.values())


def differing_keys(settings: Iterable[dict[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all, in the order in which they appear."""
    listed = list(settings)
    keys = dict.fromkeys(key for one in listed for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in listed}) > 1]


def plain(value: Any) -> str:
    """A setting as one writes it on the command line."""
    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(key: str, keys: Sequence[str]) -> str:
    """mixers.gdn.conv_size -> conv_size, unless another of the keys ends so."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key


def alike_but_for(key: str, groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that differ in nothing but `key`, together."""
    return _sets(groups, {group.mixer: {key} for group in groups})


def alike_along(key: str, groups: Sequence[Group]) -> list[list[Group]]:
    """Groups of one mixer that differ in `key` and what goes along with it, together.

    What goes along is a setting that `key` decides in all groups of the mixer: one derived from it, or a learning rate
    chosen for each of its values.
    """
    along: dict[str, set[str]] = {}
    for mixer in {group.mixer for group in groups}:
        settings = [group.settings for group in groups if group.mixer == mixer]
        along[mixer] = {key} | {other for other in differing_keys(settings) if _decides(key, other, settings)}
    return _sets(groups, along)


def _decides(key: str, other: str, settings: Sequence[dict[str, Any]]) -> bool:
    """Is the value of `other` a function of that of `key`?"""
    both = {(repr(one.get(key)), repr(one.get(other))) for one in settings}
    return len({value for value, _ in both}) == len(both) > 1


def _sets(groups: Sequence[Group], without: dict[str, set[str]]) -> list[list[Group]]:
    """Groups with equal settings, but for the keys `without` of their mixer."""
    sets: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        sets[_fingerprint(group.settings, sorted(without[group.mixer]))].append(group)
    return list(sets.values())


def _fingerprint(settings: dict[str, Any], without: Sequence[str]) -> str:
    """Equal for equal settings; those whose key matches a pattern of `without` do not count."""
    return repr(sorted((k, repr(v)) for k, v in settings.items() if not any(fnmatch(k, p) for p in without)))


def select_learning_rates(groups: Sequence[Group], metric: str) -> tuple[list[Group], list[str]]:
    """Of groups that differ in the learning rate alone, the best one, and remarks on what could not be chosen well.

    Rates are compared by their mean over the seeds that all of them finished, so that no rate wins by its seeds.
    """
    chosen, remarks = [], []
    for alike in alike_but_for(LR, groups):
        best, remark = _best_rate(alike, metric)
        chosen += best
        remarks += remark
    chosen.sort(key=groups.index)
    name_groups(chosen)
    return chosen, remarks


def _best_rate(alike: list[Group], metric: str) -> tuple[list[Group], list[str]]:
    mixer = alike[0].mixer
    measured = [group for group in alike if group.values(metric)]
    if len(alike) == 1 or not measured:
        return alike, []
    rates = sorted(group.lr for group in measured)
    remarks = [
        f"{mixer}: learning rate {plain(g.lr)} has no finished run with {metric}" for g in alike if g not in measured
    ]
    shared = set.intersection(*(set(group.values(metric)) for group in measured))
    if not shared:
        remark = f"{mixer}: no seed is finished at every learning rate ({', '.join(map(plain, rates))}); none is chosen"
        return alike, [*remarks, remark]
    best = max(measured, key=lambda g: better(metric) * fmean(g.values(metric)[pair] for pair in shared))
    best.tried = rates
    if len(rates) > 1 and best.lr in (rates[0], rates[-1]):
        end = "lowest" if best.lr == rates[0] else "highest"
        remarks.append(f"{mixer}: the best rate, {plain(best.lr)}, is the {end} tried; the optimum may lie beyond")
    return [best], remarks


def find_group(groups: Sequence[Group], label: str) -> Group:
    """The group with this label. UserError that lists them where there is none."""
    for group in groups:
        if group.label == label:
            return group
    raise UserError(
        f"--baseline {label!r}: there is no such contender. There are: {', '.join(g.label for g in groups)}."
    )
