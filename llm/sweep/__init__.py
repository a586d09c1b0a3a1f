"""``-m``: every combination of comma-separated values, each job in a process tree of its own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from llm.cli import INTERRUPTED
from llm.layout import ratio_warning
from llm.stopping import Outcome
from llm.sweep.jobs import plan_jobs
from llm.sweep.local import LocalQueue
from llm.sweep.record import SweepFolder
from llm.sweep.report import summary
from llm.sweep.settings import SweepConfig, split_words

REQUEUE = Outcome.PREEMPTED.exit_code


def sweep(words: Sequence[str]) -> int:
    """Train every job that is not finished yet; one that fails leaves the others alone. Returns the exit code.

    0: all are done (or handed to Slurm); 1: some failed; 75: some stopped, and the same command goes on. A signal goes
    to the jobs that run, which save; then the exit code is that of such a job. UserError for mistakes, before any
    training.
    """
    settings, rest = split_words(words)
    jobs = plan_jobs(settings, rest)
    for warning in dict.fromkeys(filter(None, (ratio_warning(job.config) for job in jobs))):
        print(f"warning: {warning}", file=sys.stderr)
    if any(job.config.dry_run for job in jobs):
        from llm.sweep.forecast import forecast  # it builds models

        print(forecast(settings, jobs))
        return 0
    folder = SweepFolder(settings, jobs)
    try:
        if settings.launcher == "slurm":
            return _submit(settings, folder)
        return _run_here(settings, folder)
    finally:
        folder.close()


def _run_here(settings: SweepConfig, folder: SweepFolder) -> int:
    finished = len(folder.jobs) - len(folder.waiting())
    print(f"sweep of {len(folder.jobs)} jobs, {finished} finished before; {folder.path / 'sweep.json'}", flush=True)
    received = LocalQueue(settings, folder).run()
    print(summary(folder), flush=True)
    found = [entry["status"] for entry in folder.record["jobs"]]
    if received is not None:
        print(f"stopped with {found.count('waiting')} jobs not begun; the same command goes on from here")
        return INTERRUPTED if received == signal.SIGINT else REQUEUE
    return 1 if "failed" in found else REQUEUE if "stopped" in found else 0


def _submit(settings: SweepConfig, folder: SweepFolder) -> int:
    from llm.sweep.slurm import submit

    submit(settings, folder)
    return 0
