"""Jobs on a Slurm cluster: one array of sbatch, whose script one can read.

Slurm warns the batch shell alone before the time is up or the job is preempted; the script passes that on as SIGTERM,
on which training saves, and puts the job back into the queue. (Launchers that have Slurm signal every process of a job
would end torchrun before its workers have saved.)
"""

from __future__ import annotations

import os
import shlex
import subprocess

from llm.durable import replace_file
from llm.errors import UserError
from llm.stopping import Outcome, parse_duration
from llm.sweep.local import training_command
from llm.sweep.record import SweepFolder
from llm.sweep.settings import SweepConfig

BODY = """
"${{command[@]}}" &
job=$!
trap 'told=1; kill -TERM "$job" 2>/dev/null' USR1 TERM
while true; do
    wait "$job"
    code=$?
    kill -0 "$job" 2>/dev/null || break  # else a signal ended the wait, and training is saving
done
if [ "$code" -ne 0 ] && {{ [ -n "$told" ] || [ "$code" -eq {requeue} ]; }}; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


def submit(settings: SweepConfig, folder: SweepFolder) -> None:
    """Write the script of the jobs that are neither finished nor in the queue, and hand it to sbatch."""
    entries = folder.record["jobs"]
    queued = [e["index"] for e in entries if e["status"] == "queued" and _in_queue(e.get("slurm_job"))]
    indices = [index for index in folder.waiting() if index not in queued]
    done = len(entries) - len(indices) - len(queued)
    print(f"sweep of {len(entries)} jobs: {done} finished, {len(queued)} queued before, {len(indices)} to submit")
    if not indices:
        return
    path = folder.path / "sbatch.sh"
    replace_file(path, script(settings, folder, indices).encode())
    number = _sbatch(str(path))
    for index in indices:
        folder.note(index, status="queued", exit_code=None, reason=None, slurm_job=f"{number}_{index}")
    print(f"submitted as {number}; {path}; the same command says what is left, and submits that again")


def script(settings: SweepConfig, folder: SweepFolder, indices: list[int]) -> str:
    """The batch script of these jobs, one array task each."""
    commands = [
        f"    {i}) command=({shlex.join(training_command(folder.jobs[i].words, settings.gpus_per_job))}) ;;"
        for i in indices
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options(settings, folder, indices)),
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        f"export MIXLAB_SWEEP={shlex.quote(settings.name)}",
        *settings.slurm.setup,
        'case "$SLURM_ARRAY_TASK_ID" in',
        *commands,
        "esac",
    ]
    return "\n".join(lines) + BODY.format(requeue=Outcome.PREEMPTED.exit_code)


def options(settings: SweepConfig, folder: SweepFolder, indices: list[int]) -> list[str]:
    """The options of sbatch."""
    slurm, gpus = settings.slurm, settings.gpus_per_job
    limit = "" if slurm.at_once is None else f"%{slurm.at_once}"
    minutes = max(1, round(parse_duration("slurm.time", slurm.time) / 60))
    given = {
        "job-name": settings.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "array": ",".join(map(str, indices)) + limit,
        "nodes": 1,
        "ntasks": 1,
        "gpus-per-node": gpus,
        "cpus-per-task": gpus * slurm.cpus_per_gpu,
        "mem": None if slurm.memory_gb_per_gpu is None else f"{gpus * slurm.memory_gb_per_gpu}G",
        "time": minutes,
        "signal": f"B:USR1@{slurm.warning}",
        "open-mode": "append",
        "output": (folder.path / "logs" / "%3a.log").resolve(),
    }
    named = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*named, "--requeue", *slurm.options]


def _sbatch(path: str) -> str:
    """The number of the array."""
    try:
        done = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise UserError(
            f"launcher=slurm: there is no sbatch here. Run `sbatch {path}` where there is one, or launcher=local."
        ) from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"launcher=slurm: sbatch refused {path}: {error.stderr.strip()}") from error
    return done.stdout.strip().partition(";")[0]


def _in_queue(slurm_job: str | None) -> bool:
    """Does Slurm still wait for, or run, this array task?"""
    if slurm_job is None:
        return False
    try:
        done = subprocess.run(["squeue", "--noheader", "--jobs", slurm_job], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError("launcher=slurm: there is no squeue here, and jobs of this sweep may be queued.") from error
    return done.returncode == 0 and bool(done.stdout.strip())
