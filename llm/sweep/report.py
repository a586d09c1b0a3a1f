"""What a sweep says of its jobs: while they run, at the end, and beforehand."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.columns import in_columns

if TYPE_CHECKING:
    from llm.sweep.record import SweepFolder

TAIL_BYTES = 20_000


def job_line(folder: SweepFolder, index: int) -> str:
    """One line of how a job ended, and why where it failed."""
    entry = folder.record["jobs"][index]
    loss = last_value(folder.jobs[index].run_dir, "val_loss")
    line = f"[{index + 1}/{len(folder.jobs)}] {entry['status']} ({entry['exit_code']}) after {entry['seconds']:.0f} s"
    line += "" if loss is None else f", val loss {loss:.4f}"
    return f"{line}: {describe(entry)}" + (
        f"\n    {entry['reason']}; see {folder.log(index)}" if entry["reason"] else ""
    )


def summary(folder: SweepFolder) -> str:
    """The table of all jobs: how each ended, how long it took, its newest validation loss, its folder."""
    rows = [("status", "exit", "seconds", "starts", "val loss", "job", "run folder")]
    for entry, job in zip(folder.record["jobs"], folder.jobs, strict=True):
        loss = last_value(job.run_dir, "val_loss")
        code = "" if entry["exit_code"] is None else str(entry["exit_code"])
        shown = "" if loss is None else f"{loss:.4f}"
        cells = (entry["status"], code, f"{entry['seconds']:.0f}", str(entry["starts"]), shown)
        rows.append((*cells, describe(entry), str(job.run_dir)))
    failures = [f"{describe(e)}: {e['reason']}" for e in folder.record["jobs"] if e["status"] == "failed"]
    return "\n".join([in_columns(rows), *(f"failed: {line}" for line in failures)])


def describe(entry: dict[str, Any]) -> str:
    """What distinguishes a job from the others."""
    values = {key: value for key, value in entry["values"].items() if value is not None}
    return " ".join(f"{key}={value}" for key, value in values.items()) or " ".join(entry["words"])


def last_value(run_dir: Path, name: str) -> float | None:
    """The newest value of a metric of a run; None where there is none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in reversed(lines):
        try:
            return json.loads(line)[name]
        except (ValueError, KeyError, TypeError):
            continue
    return None


def reason_of(log: Path, code: int) -> str:
    """Why a job failed, as far as its exit code and the end of its output tell."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    try:
        lines = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith("error: ") or "Error: " in line.split("  ")[0]]
    return (told or [line for line in lines if line.strip()] or ["no output"])[-1].strip()[:300]
