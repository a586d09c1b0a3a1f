"""Slurm, played by scripts: what is submitted, and what the batch script does when it is warned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm.errors import UserError
from llm.sweep import sweep
from llm.sweep.slurm import BODY

TINY = ["model=tiny", "mixer=gdn,softmax", "seed=1,2", "steps=4", "launcher=slurm", "sweep_dir=swept"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder with sbatch, squeue and scontrol, which write down what they are told."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = {
        "sbatch": 'echo "$@" >> sbatch.told; echo "77;cluster"',
        "squeue": "cat squeue.says 2>/dev/null",
        "scontrol": 'echo "$@" >> scontrol.told',
    }
    for name, line in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def statuses(folder):
    return [job["status"] for job in json.loads((folder / "swept" / "sweep.json").read_text())["jobs"]]


def test_the_jobs_are_one_array(slurm):
    words = ["slurm.partition=gpu", "slurm.time=11h30m", "slurm.at_once=3", "slurm.cpus_per_gpu=4"]
    words += ["slurm.setup=[source env/bin/activate]", "slurm.options=[--exclude=node7]"]
    assert sweep([*TINY, *words, "gpus_per_job=2"]) == 0
    script = (slurm / "swept" / "sbatch.sh").read_text()
    for line in ("--partition=gpu", "--array=0,1,2,3%3", "--time=690", "--gpus-per-node=2", "--cpus-per-task=8",
                 "--signal=B:USR1@300", "--exclude=node7", "--requeue"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "source env/bin/activate\n" in script
    assert (
        "torch.distributed.run --standalone --nproc_per_node 2 -m llm.train model=tiny mixer=gdn seed=2 steps=4)"
        in script
    )
    assert subprocess.run(["bash", "-n", "swept/sbatch.sh"]).returncode == 0
    assert (slurm / "sbatch.told").read_text() == "--parsable swept/sbatch.sh\n"
    assert statuses(slurm) == ["queued"] * 4


def test_what_is_queued_is_not_submitted_again(slurm, capsys):
    assert sweep(TINY) == 0
    (slurm / "squeue.says").write_text("77_0 RUNNING\n")  # for whatever job it is asked of
    assert sweep(TINY) == 0
    assert "4 queued before, 0 to submit" in capsys.readouterr().out
    (slurm / "squeue.says").write_text("")
    assert sweep(TINY) == 0
    assert (slurm / "sbatch.told").read_text().count("sbatch.sh") == 2


def test_without_slurm_the_script_is_there_to_take_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch here"):
        sweep(TINY)
    assert (tmp_path / "swept" / "sbatch.sh").exists()
    assert statuses(tmp_path) == ["waiting"] * 4


@pytest.mark.parametrize(
    ("code", "warned", "requeued"),
    [
        (0, False, False),
        (2, False, False),
        (75, False, True),  # out of its own max_wall_time
        (75, True, True),
        (1, True, True),  # torchrun, after its workers have saved
        (0, True, False),
    ],
)
def test_the_script_hands_the_warning_on_and_queues_again(slurm, code, warned, requeued):
    job = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit({code})))\n"  # it takes a while to save
        "pathlib.Path('ready').touch()\n"
        f"time.sleep({30 if warned else 0}); sys.exit({code})\n"
    )
    Path("job.py").write_text(job)
    Path("script.sh").write_text(f"command=({sys.executable} job.py)\n" + BODY.format(requeue=75))
    environment = {**os.environ, "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    process = subprocess.Popen(["bash", "script.sh"], env=environment)
    if warned:
        deadline = time.monotonic() + 20
        while not Path("ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == code
    told = Path("scontrol.told").read_text() if Path("scontrol.told").exists() else ""
    assert told == ("requeue 77_3\n" if requeued else "")
