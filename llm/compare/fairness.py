"""What differs between contenders beyond what is being compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llm.compare.groups import LR, Group, differing_keys, plain
from llm.compare.records import Run

TOLERANCE = 0.02  # of parameters and state size; see llm.report
DATA_ORDER = ("data.", "context", "batch_tokens")
NAMES_ONLY = ("data.name", "optim.name", "tokenizer.name")  # what they name is compared itself


@dataclass(frozen=True)
class Flag:
    """One matter in which contenders differ. `values`: what it is -> the labels of those for which it is that.

    Of two contenders `sizes` (by label) decide where there are any: they may be TOLERANCE apart.
    `affects` is 'quality' or 'speed'.
    """

    topic: str
    values: dict[str, list[str]]
    affects: str = "quality"
    sizes: dict[str, list[int | None]] | None = None

    def between(self, a: Group, b: Group) -> bool:
        """Does it set these two apart?"""
        if self.sizes is not None:
            return _apart([*self.sizes[a.label], *self.sizes[b.label]])
        return self._values_of(a) != self._values_of(b)

    def caveat(self, a: Group, b: Group) -> str | None:
        """What to say of it where it sets these two apart."""
        if not self.between(a, b):
            return None
        unknown = self.sizes is not None and None in (*self.sizes[a.label], *self.sizes[b.label])
        return f"{self.topic} (unknown)" if unknown else self.topic

    def _values_of(self, group: Group) -> set[str]:
        return {value for value, labels in self.values.items() if group.label in labels}


def flags(groups: Sequence[Group]) -> list[Flag]:
    """All matters in which the groups, or runs within one, differ and should not."""
    selected = any(group.tried for group in groups)
    found = [
        _sizes("parameters", groups, lambda run: {"": run.facts.get("non_embedding_parameters")}),
        _sizes("state size of linear layers", groups, lambda run: run.facts.get("state_elements") or {"": None}),
        _by_run("tokens", groups, lambda run: f"{run.steps * run.config.batch_tokens:,}"),
        _by_settings("data and their order", groups, lambda key: key.startswith(DATA_ORDER)),
        _by_settings("tokenizer", groups, lambda key: key.startswith("tokenizer.")),
        _by_settings(
            "optimizer and schedule",
            groups,
            lambda key: key.startswith(("optim.", "schedule.")) and not (selected and key == LR),
        ),
        _by_settings("precision", groups, lambda key: key in ("precision", "deterministic")),
        _by_settings("initial weights", groups, lambda key: key == "init_from"),
        _by_run("code version", groups, code_version),
        _by_run("torch and triton", groups, packages),
        _by_run("device", groups, device, "speed"),
    ]
    return [flag for flag in found if flag is not None]


def same_data_order(a: Group, b: Group) -> bool:
    """Do equal seeds mean equal rows in equal order, so that runs may be paired?"""
    keys = differing_keys([a.settings, b.settings])
    return not any(key.startswith((*DATA_ORDER, "tokenizer.")) for key in keys if key not in NAMES_ONLY)


def code_version(run: Run) -> str:
    """Commits that a run was trained with; a plus stands for changes on top of one."""
    versions = [_commit(start.get("git")) for start in run.starts] or ["unknown"]
    return " then ".join(dict.fromkeys(versions))


def device(run: Run) -> str:
    """What it ran on, for instance '2x NVIDIA H200'."""
    names = [_devices(start.get("devices"), start.get("host")) for start in run.starts] or ["unknown"]
    return " then ".join(dict.fromkeys(names))


def _commit(git: Any) -> str:
    if not isinstance(git, dict):
        return "unknown"
    return str(git.get("commit"))[:10] + ("+" if git.get("changed") else "")


def _devices(devices: Any, host: Any) -> str:
    if not isinstance(devices, list) or not devices:
        return f"CPU of {host}"
    return ", ".join(f"{devices.count(name)}x {name}" for name in dict.fromkeys(devices))


def packages(run: Run) -> str:
    """Versions of torch and triton that it ran with."""
    found = [start.get("packages") for start in run.starts if isinstance(start.get("packages"), dict)]
    versions = [f"torch {p.get('torch')}, triton {p.get('triton')}" for p in found] or ["unknown"]
    return " then ".join(dict.fromkeys(versions))


def _by_run(topic: str, groups: Sequence[Group], value: Callable[[Run], str], affects: str = "quality") -> Flag | None:
    values: dict[str, list[str]] = {}
    for group in groups:
        for text in dict.fromkeys(value(run) for run in group.all_runs):
            values.setdefault(text, []).append(group.label)
    return Flag(topic, values, affects) if len(values) > 1 else None


def _by_settings(topic: str, groups: Sequence[Group], belongs: Callable[[str], bool]) -> Flag | None:
    keys = [k for k in differing_keys(g.settings for g in groups) if belongs(k) and k not in NAMES_ONLY]
    if not keys:
        return None
    values: dict[str, list[str]] = {}
    for group in groups:
        text = ", ".join(f"{key}={plain(group.settings.get(key))}" for key in keys)
        values.setdefault(text, []).append(group.label)
    return Flag(topic, values)


def _sizes(topic: str, groups: Sequence[Group], sizes: Callable[[Run], dict[str, int | None]]) -> Flag | None:
    """A flag where sizes are further apart than TOLERANCE, or unknown for some; caches that grow (0) do not count."""
    found = {group.label: _distinct(map(sizes, group.all_runs)) for group in groups}
    values: dict[str, list[str]] = {}
    for label, known in found.items():
        text = " and ".join("unknown" if size is None else f"{size:,}" for size in known) or "none"
        values.setdefault(text, []).append(label)
    return Flag(topic, values, sizes=found) if _apart([size for known in found.values() for size in known]) else None


def _apart(sizes: Sequence[int | None]) -> bool:
    """Further apart than TOLERANCE, or is one unknown that another may differ from?"""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return len(sizes) > 1
    return bool(known) and max(known) > min(known) * (1 + TOLERANCE)


def _distinct(sizes: Iterable[dict[str, int | None]]) -> list[int | None]:
    return list(dict.fromkeys(size for one in sizes for size in one.values() if size != 0))
