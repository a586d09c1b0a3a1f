"""Workers one after the other, each with a limit of time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llm.bench.timing import Timing, table
from llm.bench.worker import MARK


def run_jobs(jobs: Sequence[dict[str, Any]], *, limit: float) -> list[Timing]:
    """The timings of all jobs, printed as they come; what does not come within `limit` seconds, or fails, says so.

    While a job runs, the next one's process imports what it needs, which does not touch the device.
    """
    timings: list[Timing] = []
    ready = [start_worker(job) for job in jobs[:1]]
    for number, job in enumerate(jobs):
        worker, ready = ready[0], [start_worker(job) for job in jobs[number + 1 : number + 2]]
        for timing in run_job(job, worker, limit):
            print(table([timing]).splitlines()[-1], flush=True)
            timings.append(timing)
    return timings


def start_worker(job: dict[str, Any]) -> subprocess.Popen[str]:
    """A process that imports, and does `job` when it reads a line."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(worker_command(job), **pipes, text=True, start_new_session=True)


def run_job(job: dict[str, Any], worker: subprocess.Popen[str], limit: float) -> list[Timing]:
    """The timings of one job; those that are missing at the end with the reason why."""
    timer = threading.Timer(limit, _end, [worker])
    timer.start()
    try:
        out, err = worker.communicate("go\n")
    finally:
        finished = timer.is_alive()
        timer.cancel()
        _end(worker)
    found = [Timing(**json.loads(line.removeprefix(MARK))) for line in out.splitlines() if line.startswith(MARK)]
    reason = _last_line(err) if finished else f"not finished after {limit:.0f} s"
    wanted = [(context, packed) for context in job["contexts"] for packed in job["packed"]]
    return found + [Timing(job["name"], *missing, failed=reason) for missing in wanted[len(found) :]]


def worker_command(job: dict[str, Any]) -> list[str]:
    """The command line of the process that does `job`."""
    return [sys.executable, "-m", "llm.bench.worker", json.dumps(job)]


def _end(worker: subprocess.Popen[str]) -> None:
    """Kill the worker and what it started, compilers among them."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "ended without a word"
