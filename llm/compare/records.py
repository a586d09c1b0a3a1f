"""A run folder as a comparison reads it: tolerant of age, of damage, and of never having got far.

Nothing of a folder is executed: no class that a config names is imported, so a stranger's runs are safe to read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from llm.compare.evaluations import Series, read_evaluations
from llm.config import TrainConfig
from llm.errors import UserError
from llm.finished import is_good_enough
from llm.identity import SCHEMA_VERSION, identity, mixer_label
from llm.layout import layer_names
from llm.schedules import total_steps

LARGEST_HEADER = 100_000_000  # bytes, of a safetensors file
OUTSIDE_THE_BLOCKS = ("embeddings.", "lm_head.")


class UnreadableRun(Exception):
    """A folder that holds no run that can be read; the message says why."""


@dataclass(frozen=True)
class Run:
    """One run: its settings, what it logged, where and with which code it ran."""

    path: Path
    config: TrainConfig
    settings: dict[str, Any]
    metrics: list[dict[str, float]]
    starts: list[dict[str, Any]]
    facts: dict[str, Any]
    evaluations: list[Series] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    until: int | None = None  # the step at which it is looked at, where that is not its last

    @property
    def pair(self) -> tuple[int, int]:
        """What two runs must share to be paired: the seeds of weights and of data order."""
        return self.config.seed, self.config.data.seed

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of its whole schedule."""
        return total_steps(self.config)

    @property
    def step(self) -> int:
        """The last step that it logged; 0 for none."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @cached_property
    def finished(self) -> bool:
        """Did it reach its last step (or the one at which it is looked at), or the accuracy that was enough?"""
        if self.until is not None:
            return self.step >= self.until
        return self.step >= self.steps or is_good_enough(self.config.eval.enough_accuracy, self.latest)

    @cached_property
    def latest(self) -> dict[str, float]:
        """The newest value of everything that it logged."""
        return {name: value for line in self.metrics for name, value in line.items()}

    def cut(self, step: int) -> Run:
        """The run as of `step`: what it logged later, and its evaluations, are not looked at."""
        lines = [line for line in self.metrics if line["step"] <= step]
        return dataclasses.replace(self, metrics=lines or self.metrics[:1], evaluations=[], until=step)

    @property
    def resumes(self) -> int:
        """How often it was started again."""
        return max(0, len(self.starts) - 1)

    @property
    def mixer(self) -> str:
        """For instance hybrid_gdn_3to1."""
        return mixer_label(self.config)

    def final(self, metric: str) -> float | None:
        """The value at the end of training (of validation: the one after the last step); None where none is finite.

        Names of evaluations count too where they have a single value, as 'recall' of one task does.
        """
        if metric == "tokens_per_second":
            return self.speed
        if metric in self.metrics[-1]:
            value = self.metrics[-1][metric]
            return value if math.isfinite(value) else None
        return next((s.points[0][1] for s in self.evaluations if s.measure == metric and len(s.points) == 1), None)

    @cached_property
    def speed(self) -> float | None:
        """Median training throughput in tokens/s over all its devices; the first line has compilation in it."""
        rates = [line["tokens_per_second"] for line in self.metrics[1:] if line.get("tokens_per_second")]
        return median(rates) if rates else None

    def axis(self, name: str) -> list[float | None]:
        """The x of every line of metrics: 'step', 'tokens', 'flops', or 'hours' of training (saving and validation
        left out), which is the sum over lines of their tokens over their tokens/s."""
        tokens = [line["step"] * self.config.batch_tokens for line in self.metrics]
        if name == "tokens":
            return tokens
        if name == "flops":
            each = self.facts.get("flops_a_token")
            return [None if each is None else each * n for n in tokens]
        if name == "hours":
            return list(self._hours(tokens))
        return [line["step"] for line in self.metrics]

    def _hours(self, tokens: list[int]) -> Iterator[float | None]:
        seconds, counted, rate = 0.0, 0, self.speed or self.latest.get("tokens_per_second")
        for line, n in zip(self.metrics, tokens, strict=True):
            rate = line.get("tokens_per_second") or rate
            if rate:
                seconds, counted = seconds + (n - counted) / rate, n
            yield seconds / 3600 if rate else None


def read_run(path: Path) -> Run:
    """The run in `path`. Raises UnreadableRun."""
    config, settings, notes = _read_config(path / "config.yaml")
    metrics, torn = _read_metrics(path / "metrics.jsonl")
    if torn:
        notes.append(f"{torn} unreadable lines of metrics left out")
    if not metrics:
        raise UnreadableRun("no step is logged yet")
    starts = _read_json(path / "environment.json")
    facts = _read_json(path / "model.json")
    evaluations, damaged = read_evaluations(path)
    notes += [f"{name} is unreadable and left out" for name in damaged]
    early = {series.step for series in evaluations} - {metrics[-1]["step"], None}
    notes += [f"its evaluation at step {step:,} is not of the end, and left out" for step in sorted(early)]
    return Run(
        path,
        config,
        settings,
        metrics,
        [s for s in starts if isinstance(s, dict)] if isinstance(starts, list) else [],
        _good_facts(facts) or _facts_of_weights(path),
        [series for series in evaluations if series.step not in early],
        tuple(notes),
    )


def _read_config(path: Path) -> tuple[TrainConfig, dict[str, Any], list[str]]:
    """The configuration, the settings that decide results, and notes. Keys that it lacks have today's defaults."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UnreadableRun("it has no config.yaml") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UnreadableRun("its config.yaml cannot be read") from error
    version = raw.pop("schema_version", None) if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise UnreadableRun("its config.yaml is not one of a run (no schema_version)")
    if version > SCHEMA_VERSION:
        raise UnreadableRun(
            f"a newer mixlab wrote it (schema_version {version}, this one reads up to {SCHEMA_VERSION})"
        )
    unknown: dict[str, Any] = {}
    try:
        config = _typed(TrainConfig, raw, "", unknown)
        layer_names(config), total_steps(config)
        (config.seed + config.data.seed + config.batch_tokens + config.context).bit_length()
        settings = identity(config) | unknown
    except (UserError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise UnreadableRun(f"its config.yaml does not make sense: {error}") from error
    return config, settings, [f"settings that this version does not know: {', '.join(unknown)}"] if unknown else []


def _typed(schema: type, raw: dict[str, Any], prefix: str, unknown: dict[str, Any]) -> Any:
    """An instance of the dataclass from plain data; keys that it does not have go to `unknown`."""
    types, known, values = typing.get_type_hints(schema), {f.name for f in dataclasses.fields(schema)}, {}
    for name, value in raw.items():
        if name not in known:
            unknown[f"{prefix}{name}"] = value
        elif dataclasses.is_dataclass(types[name]):
            values[name] = _typed(types[name], dict(value), f"{prefix}{name}.", unknown)
        else:
            values[name] = value
    return schema(**values)


def _read_metrics(path: Path) -> tuple[list[dict[str, float]], int]:
    """Lines in the order of their steps, the last of each step, and how many are torn."""
    lines: dict[int, dict[str, float]] = {}
    torn = 0
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError:
        return [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            values = json.loads(line)
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            lines[int(numbers["step"])] = numbers
        except (ValueError, KeyError, AttributeError, OverflowError):
            torn += 1
    return [lines[step] for step in sorted(lines)], torn


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _good_facts(facts: Any) -> dict[str, Any]:
    """model.json, as far as its figures are figures."""
    if not isinstance(facts, dict):
        return {}
    state = facts.get("state_elements")
    good = {k: v for k, v in facts.items() if isinstance(v, int | float) and math.isfinite(v)}
    if isinstance(state, dict) and all(isinstance(n, int) for n in state.values()):
        good["state_elements"] = state
    return good


def _facts_of_weights(run_dir: Path) -> dict[str, Any]:
    """Parameters of a run that has no model.json, counted from the headers of its newest checkpoint, if it has one."""
    folder = max(run_dir.glob("checkpoints/step_*"), default=None)
    try:
        headers = [_tensor_header(p) for p in sorted(folder.glob("model*.safetensors"))] if folder else []
        sizes = {n: math.prod(t["shape"]) for header in headers for n, t in header.items() if n != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return {}
    if not sizes:
        return {}
    inside = sum(size for name, size in sizes.items() if not name.startswith(OUTSIDE_THE_BLOCKS))
    return {"parameters": sum(sizes.values()), "non_embedding_parameters": inside}


def _tensor_header(path: Path) -> dict[str, Any]:
    """The JSON that a safetensors file begins with: name -> dtype, shape, offsets."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > LARGEST_HEADER:
            raise ValueError(f"{path}: no safetensors file")
        return json.loads(file.read(length))
