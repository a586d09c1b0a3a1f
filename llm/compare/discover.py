"""Run folders below the paths of a command line, and what was passed over on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm.compare.records import Run, UnreadableRun, read_run
from llm.errors import UserError

LONGEST_REASON = 100  # characters of what a sweep noted of a failed job
MARKS = ("config.yaml", "metrics.jsonl", "environment.json")  # a folder with any of these is, or was, a run


@dataclass(frozen=True)
class Skipped:
    """A folder that takes no part, and why."""

    path: str
    reason: str


def find(paths: Iterable[Path | str]) -> tuple[list[Path], list[Skipped]]:
    """Run folders at or below each path, each once, and what sweeps tell of jobs that failed or have no folder.

    A sweep's folder stands for the runs of its jobs, wherever they lie. UserError where a path is no folder.
    """
    folders: dict[Path, Path] = {}
    absent: dict[str, Skipped] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"{path}: no such folder. Give run folders, or folders that hold some.")
        for found in _below(path):
            if isinstance(found, Skipped):
                absent.setdefault(found.path, found)
            else:
                folders.setdefault(found.resolve(), found)
    return list(folders.values()), list(absent.values())


def _below(path: Path) -> Iterator[Path | Skipped]:
    for folder, subfolders, files in os.walk(path):
        if "sweep.json" in files:
            subfolders.clear()
            yield from _jobs(Path(folder))
        elif any(mark in files for mark in MARKS):
            subfolders.clear()
            yield Path(folder)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))


def _jobs(sweep: Path) -> Iterator[Path | Skipped]:
    """The run folders of a sweep's jobs; for a job that failed or has none, what the sweep knows of it."""
    try:
        jobs = [(entry, sweep / entry["run_dir"]) for entry in json.loads((sweep / "sweep.json").read_bytes())["jobs"]]
    except (OSError, ValueError, KeyError, TypeError):
        yield Skipped(str(sweep / "sweep.json"), "unreadable")
        return
    for entry, folder in jobs:
        known = Path(os.path.normpath(folder))
        copied = (sweep / known.name, sweep.parent / known.name, sweep.parent / "runs" / known.name)
        found = next((f for f in (known, *copied) if any((f / mark).is_file() for mark in MARKS)), None)
        if found is not None:
            yield found
        if found is None or entry.get("status") == "failed":
            why = f" ({entry['reason'][:LONGEST_REASON]})" if entry.get("reason") else ""
            values = [f"{key}={value}" for key, value in (entry.get("values") or {}).items() if value is not None]
            said = f"job '{' '.join(values or entry.get('words', []))}' {entry.get('status')}{why}"
            yield Skipped(str(found or known), said if found else f"no run; {said}")


def gather(paths: Iterable[Path | str]) -> tuple[list[Run], list[Skipped]]:
    """The runs at or below the paths, each once, and everything that takes no part. UserError as `find`."""
    folders, told = find(paths)
    runs, unreadable = read_all(folders)
    runs, copies = without_copies(runs)
    # by name: a sweep may have been copied without its runs, and these to another place
    finished = {run.path.name for run in runs if run.finished}
    reasons: dict[str, list[str]] = {}
    for one in [*unreadable, *copies, *(job for job in told if Path(job.path).name not in finished)]:
        reasons.setdefault(one.path, []).append(one.reason)
    return runs, [Skipped(path, "; ".join(said)) for path, said in reasons.items()]


def read_all(folders: Iterable[Path]) -> tuple[list[Run], list[Skipped]]:
    """The runs of the folders, and those folders that hold none that can be read."""
    runs, skipped = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UnreadableRun as error:
            skipped.append(Skipped(str(folder), str(error)))
    return runs, skipped


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[Skipped]]:
    """Of runs that agree in all settings and seeds, the one that got furthest: a copy is no further evidence."""
    best: dict[str, Run] = {}
    skipped = []
    for run in runs:
        key = repr(sorted((name, repr(value)) for name, value in run.settings.items()))
        other = best.get(key)
        if other is None or run.step > other.step:
            best[key] = run
        if other is not None:
            lesser = other if best[key] is run else run
            skipped.append(Skipped(str(lesser.path), f"the same settings and seed as {best[key].path}"))
    return list(best.values()), skipped
