"""A sweep's folder: sweep.json says what its jobs are and how they fared, logs/ holds what they printed.

sweep.json, rewritten whole at each change::

    {"schema_version": 1, "name": ..., "command": [...], "created": ..., "updated": ...,
     "axes": {"mixer": ["gdn", "kda"], "seed": ["1", "2"]},          keys in which jobs differ, values as typed
     "jobs": [{"index": 0, "words": [...], "values": {"mixer": "gdn", "seed": "1"},
               "run_dir": "../../runs/...",                          relative to the folder of sweep.json
               "status": "waiting" | "queued" | "running" | "done" | "stopped" | "failed",
               "exit_code": 0, "seconds": 12.3, "starts": 1, "reason": null, "log": "logs/000.log"}]}

`values` has a key for each axis, null where the job does not give it. "queued" is with Slurm, under "slurm_job".
Whether a run is finished, its own folder says (`llm.finished`); the status is what the sweep saw last.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm.durable import replace_file
from llm.errors import UserError
from llm.finished import is_finished
from llm.runlock import RunLock
from llm.sweep.jobs import Job, axes
from llm.sweep.settings import SweepConfig

SCHEMA_VERSION = 1
UNTRIED = {"exit_code": None, "seconds": 0.0, "starts": 0, "reason": None}


class SweepFolder:
    """The open folder of a sweep, locked against other processes until `close`."""

    def __init__(self, settings: SweepConfig, jobs: Sequence[Job]) -> None:
        self.jobs, self.path = jobs, folder_of(settings, jobs)
        (self.path / "logs").mkdir(parents=True, exist_ok=True)
        self.lock = RunLock(self.path)
        try:
            self.lock.acquire()
        except UserError as error:
            raise UserError(f"sweep_dir={self.path} is in use by another process: wait for it to end.") from error
        try:
            self.record = self._continued(settings.name)
        except UserError:
            self.lock.release()
            raise
        self.save()

    def log(self, index: int) -> Path:
        """Where the output of a job goes."""
        return self.path / self.record["jobs"][index]["log"]

    def waiting(self) -> list[int]:
        """The jobs that have still to be done."""
        return [entry["index"] for entry in self.record["jobs"] if entry["status"] != "done"]

    def note(self, index: int, **values: Any) -> None:
        """Change what is known of a job."""
        self.record["jobs"][index] |= values
        self.save()

    def save(self) -> None:
        self.record["updated"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        replace_file(self.path / "sweep.json", json.dumps(self.record, indent=1).encode())

    def close(self) -> None:
        """Let others use the folder."""
        self.lock.release()

    def _continued(self, name: str) -> dict[str, Any]:
        """The record of these jobs, with what an earlier one knew of them. UserError if it knew of others too."""
        before = read_record(self.path) or {}
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        known = {tuple(entry["words"]): entry for entry in before.get("jobs", [])}
        lost = known.keys() - {tuple(job.words) for job in self.jobs}
        if lost:
            raise UserError(
                f"sweep_dir={self.path} holds another sweep: {len(lost)} of its jobs, like {' '.join(min(lost))}, are "
                "not among these. Choose another sweep_dir, or name its jobs too."
            )
        varied, taken = axes(self.jobs), {entry["log"] for entry in known.values()}
        unused = (name for i in itertools.count() if (name := f"logs/{i:03d}.log") not in taken)
        entries = []
        for index, job in enumerate(self.jobs):
            earlier = known.get(tuple(job.words), {})
            unfinished = "queued" if earlier.get("status") == "queued" else "waiting"
            now_known = {
                "index": index,
                "words": job.words,
                "values": {key: job.values().get(key) for key in varied},
                "run_dir": os.path.relpath(job.run_dir, self.path),
                "status": "done" if is_finished(job.config, job.run_dir) else unfinished,
                "log": earlier["log"] if earlier else next(unused),
            }
            entries.append(now_known | UNTRIED | earlier | now_known)
        return {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "command": sys.orig_argv,
            "created": before.get("created", now),
            "updated": now,
            "axes": varied,
            "jobs": entries,
        }


def folder_of(settings: SweepConfig, jobs: Sequence[Job]) -> Path:
    """sweeps/<name>-<hash of the jobs' words> unless `sweep_dir` says otherwise: the same command finds it again."""
    if settings.sweep_dir is not None:
        return Path(settings.sweep_dir)
    digest = hashlib.sha256(json.dumps([job.words for job in jobs]).encode()).hexdigest()[:8]
    return Path("sweeps") / f"{settings.name}-{digest}"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The content of a sweep's sweep.json; None where there is none. UserError for one that cannot be read."""
    path = folder / "sweep.json"
    try:
        record = json.loads(path.read_text())
        version = record["schema_version"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is unreadable: move it away, or choose another sweep_dir.") from error
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version {version}, but this version of mixlab reads {SCHEMA_VERSION}.")
    return record
