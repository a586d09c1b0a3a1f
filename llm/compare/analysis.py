"""The comparison itself: estimates, paired differences corrected for their number, and what has to be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from llm.compare.discover import Skipped
from llm.compare.fairness import Flag, flags, same_data_order
from llm.compare.groups import Group, better, find_group, group_runs, select_learning_rates
from llm.compare.records import Run
from llm.compare.statistics import (
    ALPHA,
    Difference,
    Estimate,
    estimate,
    holm_levels,
    paired_difference,
    unpaired_difference,
)
from llm.errors import UserError
from llm.layout import ratio_warning

METRICS = ("val_loss", "val_accuracy", "loss")  # the first that any finished run has is compared by default


@dataclass(frozen=True)
class Verdict:
    """The difference b - a of two contenders, the level at which it is tested, and what sets them apart otherwise."""

    a: Group
    b: Group
    difference: Difference
    level: float
    caveats: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Does the corrected interval exclude zero?"""
        return self.difference.p is not None and self.difference.p < self.level

    @property
    def interval(self) -> tuple[float, float] | None:
        """The corrected interval."""
        return self.difference.interval(self.level)

    @property
    def seeds_missing(self) -> int | None:
        """Further seeds that would probably settle a difference of this size; None where nobody can tell."""
        needed = self.difference.seeds_needed(self.level)
        return None if needed is None else max(1, needed - self.difference.n)


@dataclass(frozen=True)
class Comparison:
    """Everything that a report says.

    `candidates` are the contenders before the choice of learning rates, `remarks` sentences about the whole, `at` the
    step at which runs are looked at where that is not their end.
    """

    metric: str
    groups: list[Group]
    candidates: list[Group]
    estimates: dict[str, Estimate]
    verdicts: list[Verdict]
    flags: list[Flag]
    skipped: list[Skipped]
    remarks: list[str]
    reference: Group
    at: int | None

    @property
    def best(self) -> Group | None:
        """The group with the best mean."""
        measured = [group for group in self.groups if group.label in self.estimates]
        return max(measured, key=lambda g: better(self.metric) * self.estimates[g.label].mean, default=None)

    def apart(self, group: Group) -> list[str]:
        """The matters in which a contender differs from the reference beyond its mixer."""
        if group is self.reference:
            return []
        return [c for flag in self.flags if (c := flag.caveat(group, self.reference)) is not None]

    def notes(self, group: Group) -> list[str]:
        """What has to be said of one contender beside its numbers."""
        return _notes(group, self)


def compare(
    runs: Sequence[Run],
    skipped: Sequence[Skipped] = (),
    *,
    metric: str | None = None,
    baseline: str | None = None,
    select_lr: bool = False,
    ignore: Sequence[str] = (),
    at: int | None = None,
) -> Comparison:
    """Compare by the final value of `metric`, or that at step `at`; all pairs, or all against `baseline` (a label).

    Raises UserError where there is nothing to compare, or no such metric or baseline.
    """
    if not runs:
        raise UserError("there is no run to compare" + _reasons(skipped))
    if at is not None:
        runs = [run.cut(at) for run in runs]
    candidates, remarks = group_runs(runs, ignore), []
    metric = metric or next((m for m in METRICS if any(g.values(m) for g in candidates)), METRICS[0])
    _check_metric(metric, runs)
    groups = candidates
    if select_lr:
        groups, remarks = select_learning_rates(candidates, metric)
        remarks.insert(0, f"the best learning rate of each contender was chosen by {metric} on these very seeds")
    found = flags(groups)
    reference = find_group(groups, baseline) if baseline else groups[0]
    pairs = [(reference, g) for g in groups if g is not reference] if baseline else list(combinations(groups, 2))
    verdicts = _verdicts(pairs, metric, found)
    estimates = {g.label: estimate(list(values.values())) for g in groups if (values := g.values(metric))}
    if verdicts and all(verdict.difference.p is None for verdict in verdicts):
        remarks.append("no two contenders have two seeds in common, so none can be told apart: train at least three")
    return Comparison(metric, groups, candidates, estimates, verdicts, found, list(skipped), remarks, reference, at)


def _check_metric(metric: str, runs: Sequence[Run]) -> None:
    names = {name for run in runs for name in run.latest} | {s.measure for run in runs for s in run.evaluations}
    if metric not in names:
        raise UserError(f"--metric {metric}: no run has it. There are: {', '.join(sorted(names))}.")


def _verdicts(pairs: Sequence[tuple[Group, Group]], metric: str, found: Sequence[Flag]) -> list[Verdict]:
    compared = [(a, b, d) for a, b in pairs if (d := difference(a, b, metric)) is not None]
    tested = [d.p for _, _, d in compared if d.p is not None]
    levels = iter(holm_levels(tested))
    verdicts = []
    for a, b, d in compared:
        level = next(levels) if d.p is not None else ALPHA
        caveats = tuple(c for flag in found if flag.affects == "quality" and (c := flag.caveat(a, b)) is not None)
        verdicts.append(Verdict(a, b, d, level, caveats))
    return verdicts


def difference(a: Group, b: Group, metric: str) -> Difference | None:
    """b - a: paired over the seeds that both finished, or unpaired where they share none or saw other data."""
    mine, theirs = a.values(metric), b.values(metric)
    if not mine or not theirs:
        return None
    shared = sorted(set(mine) & set(theirs))
    if shared and same_data_order(a, b):
        return paired_difference([mine[p] for p in shared], [theirs[p] for p in shared])
    return unpaired_difference(list(mine.values()), list(theirs.values()))


def missing_seeds(groups: Sequence[Group], group: Group) -> list[tuple[int, int]]:
    """Pairs of seeds that other groups have a run of, and this one has not even begun."""
    everywhere = {run.pair for g in groups for run in g.all_runs}
    return sorted(everywhere - {run.pair for run in group.all_runs})


def describe_seeds(pairs: Sequence[tuple[int, int]]) -> str:
    """'seeds 2, 3', with the data seed where it is not 0."""
    words = [f"{seed}" + (f" (data {data})" if data else "") for seed, data in pairs]
    return f"seed{'s' if len(words) > 1 else ''} {', '.join(words)}"


def _notes(group: Group, comparison: Comparison) -> list[str]:
    notes = []
    if group.tried:
        notes.append(f"lr {group.lr:.6g}, the best of {', '.join(f'{lr:.6g}' for lr in group.tried)}")
    if warning := ratio_warning(group.all_runs[0].config):
        notes.append(warning)
    stuck: dict[str, list[tuple[int, int]]] = {}
    for run in group.unfinished:
        stuck.setdefault(f"left out: {why_left_out(run)}", []).append(run.pair)
    notes += [f"{describe_seeds(pairs)} {text}" for text, pairs in stuck.items()]
    if absent := missing_seeds(comparison.groups, group):
        notes.append(f"{describe_seeds(absent)} missing")
    if without := sorted(set(group.runs) - set(group.values(comparison.metric))):
        notes.append(f"{describe_seeds(without)} left out: no finite {comparison.metric} at the end")
    notes += [f"{describe_seeds([run.pair])} resumed {run.resumes}x" for run in group.runs.values() if run.resumes]
    return notes + [f"{describe_seeds([run.pair])}: {note}" for run in group.all_runs for note in run.notes]


def why_left_out(run: Run) -> str:
    """Why a run of a contender does not count."""
    if run.finished:  # it differs from one that counts in a setting that the user chose to ignore
        return f"a second run with these seeds ({run.path})"
    return f"unfinished, at step {run.step:,} of {run.until or run.steps:,}"


def _reasons(skipped: Sequence[Skipped]) -> str:
    return ": " + "; ".join(f"{s.path}: {s.reason}" for s in skipped) + "." if skipped else ". Give other folders."
