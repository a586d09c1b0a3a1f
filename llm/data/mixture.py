"""Several sources in one sequence, their shares of the tokens exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llm.config import DataConfig
from llm.data.files import entries_of
from llm.data.order import derive_key, digest, permutation
from llm.data.rows import Lane, Place, Rows
from llm.data.stored import HeldOutRows
from llm.data.text import TextFiles
from llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PERIOD = 10_000  # rows that hold every source by its weight exactly: weights count in units of 1 / PERIOD


class Mixture:
    """Sources by name, each with a weight: its share of the rows, and so of the tokens.

    A source is an object like `TextFiles`, or a path. `max_repeats` is how many epochs of a source are used at most;
    then the others go on, their weights in proportion.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        max_repeats: float | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UserError("data.path: give the sources of a mixture by name, data.path={name: path, ...}.")
        weights = dict.fromkeys(sources, 1.0) if weights is None else weights
        if set(sources) != set(weights):
            raise UserError(
                f"data.source.weights={dict(weights)}: give one weight for each source, {', '.join(sources)}."
            )
        if min(weights.values()) <= 0:
            raise UserError(f"data.source.weights={dict(weights)}: weights are above 0.")
        self._sources = {name: _as_source(name, source) for name, source in sources.items()}
        self._weights, self._max_repeats = dict(weights), max_repeats

    def training_rows(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> MixedRows:
        """The endless rows of training. Raises UserError as the sources do."""
        parts = {
            name: source.training_rows(self._settings_of(config, name), tokenizer, context)
            for name, source in self._sources.items()
        }
        return MixedRows(config.name, parts, self._weights, seed=config.seed, max_repeats=self._max_repeats)

    def validation_sets(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, context: int
    ) -> dict[str, HeldOutRows]:
        """The held-out rows of each source, by the source's name; those of `data.validation_path` where it is given."""
        if config.validation_path is not None:
            return TextFiles(None, config.validation_path).validation_sets(config, tokenizer, context)
        sets = {}
        for name, source in self._sources.items():
            found = source.validation_sets(self._settings_of(config, name), tokenizer, context)
            sets |= {label.replace("validation", name, 1): held_out for label, held_out in found.items()}
        return sets

    @staticmethod
    def _settings_of(config: DataConfig, name: str) -> DataConfig:
        held_out = config.held_out if config.validation_path is None else 0.0
        seed = derive_key(config.seed, "source", name)
        return replace(config, name=f"{config.name}/{name}", seed=seed, held_out=held_out)


def _as_source(name: str, source: Any) -> Any:
    """A source as it is, a path as files of text."""
    if hasattr(source, "training_rows"):
        return source
    entries_of(source, key=f"data.path.{name}")
    return TextFiles(source)


class Phase(NamedTuple):
    """Periods in which the same sources take part.

    start   the first period
    counts  rows of each source a period
    before  rows of each source before it
    """

    start: int
    counts: dict[str, int]
    before: dict[str, int]


class MixedRows:
    """Rows of several sources: each period of `PERIOD` rows has exactly the same number of each, in a seeded order."""

    n_rows = None

    def __init__(
        self, name: str, parts: dict[str, Rows], weights: dict[str, float], *, seed: int, max_repeats: float | None
    ) -> None:
        self.name, self.parts, self._seed = name, parts, seed
        self.context = next(iter(parts.values())).context
        self.phases = _phases(parts, weights, max_repeats)
        shares = [phase._asdict() for phase in self.phases]
        self.fingerprint = digest("mix", {name: part.fingerprint for name, part in parts.items()}, shares, seed)
        self._recent: tuple[int, Any] = (-1, None)  # a period and what `_period` says of it

    def place(self, row: int) -> Place:
        period, position = divmod(row, PERIOD)
        phase, sources, indices = self._period_of(period)
        source = sources[position]
        index = phase.before[source] + (period - phase.start) * phase.counts[source] + indices[position]
        lane, inner = self.parts[source].place(index)
        return Place(f"{source}:{lane}", inner)

    def lanes(self) -> list[str]:
        return [f"{name}:{lane}" for name, part in self.parts.items() for lane in part.lanes()]

    def open_lane(self, lane: str, index: int = 0, state: Any = None) -> Lane:
        source, _, inner = lane.rpartition(":")
        return self.parts[source].open_lane(inner, index, state)

    def summary(self) -> dict[str, Any]:
        return {name: part.summary() | {"share": self._share(name)} for name, part in self.parts.items()}

    def document_lengths(self, at_most: int) -> np.ndarray:
        share = -(-at_most // len(self.parts))
        return np.concatenate([part.document_lengths(share) for part in self.parts.values()])

    def progress(self, state: dict[str, Any]) -> dict[str, float]:
        """Tokens of each source up to a state, and the epochs of it that they make."""
        period, rest = divmod(state["row"], PERIOD)
        phase, sources, _ = self._period_of(period)
        found = {}
        for name, part in self.parts.items():
            whole = phase.before[name] + (period - phase.start) * phase.counts.get(name, 0)
            rows = whole + sources[:rest].count(name)
            lanes = {lane.rpartition(":")[2]: at for lane, at in state["lanes"].items() if lane.startswith(f"{name}:")}
            found |= {f"{key}/{name}": value for key, value in part.progress({"row": rows, "lanes": lanes}).items()}
        return found

    def _share(self, name: str) -> float:
        return self.phases[0].counts[name] / PERIOD

    def _period_of(self, period: int) -> tuple[Phase, list[str], list[int]]:
        if self._recent[0] != period:
            self._recent = period, self._period(period)
        return self._recent[1]

    def _period(self, period: int) -> tuple[Phase, list[str], list[int]]:
        """The phase of a period, and for each of its rows the source and which of the source's rows in the period."""
        phase = next(phase for phase in reversed(self.phases) if phase.start <= period)
        if not phase.counts:
            raise UserError(
                f"data={self.name}: after {phase.start * PERIOD * self.context:,} tokens every source was repeated "
                "data.source.max_repeats times. Give more text, allow more repeats, or train on fewer tokens."
            )
        in_order = [name for name, count in phase.counts.items() for _ in range(count)]
        order = permutation(PERIOD, derive_key(self._seed, "mix", period))
        sources = [in_order[position] for position in order]
        seen = dict.fromkeys(phase.counts, 0)
        indices = []
        for source in sources:
            indices.append(seen[source])
            seen[source] += 1
        return phase, sources, indices


def _phases(parts: dict[str, Rows], weights: dict[str, float], max_repeats: float | None) -> list[Phase]:
    """The phases: a new one whenever a source has used up its repeats. The last may have no source."""
    limits = {} if max_repeats is None else {name: _limit(name, part, max_repeats) for name, part in parts.items()}
    start, before, left = 0, dict.fromkeys(parts, 0), dict(weights)
    phases = []
    while True:
        phase = Phase(start, _apportion(left), dict(before))
        phases.append(phase)
        lasting = {name: (limits[name] - before[name]) // phase.counts[name] for name in left if name in limits}
        if not lasting:
            return phases
        periods = min(lasting.values())
        start += periods
        before = {name: rows + periods * phase.counts.get(name, 0) for name, rows in before.items()}
        left = {name: weight for name, weight in left.items() if lasting[name] > periods}


def _limit(name: str, part: Rows, max_repeats: float) -> int:
    if part.n_rows is None:
        raise UserError(
            f"data.source.max_repeats={max_repeats}: the length of {name} is unknown while it is streamed. Prepare it "
            "(scripts/prepare_data.py), keep it in memory (data.mode=memory), or leave max_repeats out."
        )
    return int(max_repeats * part.n_rows)


def _apportion(weights: dict[str, float]) -> dict[str, int]:
    """Rows of each source in a period: by largest remainder, at least one."""
    if not weights:
        return {}
    total = sum(weights.values())
    exact = {name: PERIOD * weight / total for name, weight in weights.items()}
    counts = {name: max(1, int(share)) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in np.resize(by_remainder, max(0, PERIOD - sum(counts.values()))).tolist():
        counts[name] += 1
    largest = max(counts, key=counts.__getitem__)
    counts[largest] -= sum(counts.values()) - PERIOD
    return counts
