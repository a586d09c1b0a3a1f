"""Sweeps: what they run, what they refuse, how they stop and go on."""

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
from llm.paths import configs_dir
from llm.sweep import sweep
from llm.sweep.jobs import axes, plan_jobs, products
from llm.sweep.local import places
from llm.sweep.record import SweepFolder
from llm.sweep.report import reason_of
from llm.sweep.settings import SweepConfig, split_words

TINY = ["model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16", "model.linear_head_dim=16",
        "model.parameters=40000", "context=32", "batch_tokens=64", "eval.max_rows=1", "logger=jsonl"]  # fmt: skip
PRESETS = sorted(path.stem for path in (configs_dir() / "sweep").glob("*.yaml"))


def record_of(folder: Path) -> dict:
    (path,) = folder.glob("sweeps/*/sweep.json")
    return json.loads(path.read_text())


def test_jobs_are_the_product_of_the_values():
    assert products(["mixer=gdn,kda", "pattern=[gdn,softmax]", "seed=range(2)"]) == [
        [f"mixer={m}", "pattern=[gdn,softmax]", f"seed={s}"] for m in ("gdn", "kda") for s in (0, 1)
    ]


def test_grids_are_joined_and_the_command_line_replaces_their_words():
    settings = SweepConfig(
        common=["seed=1,2", "steps=9"], grids=[["mixer=softmax"], ["mixer=gdn", "model.linear_head_dim=16,32"]]
    )
    jobs = plan_jobs(settings, ["steps=5"])
    assert [" ".join(job.words) for job in jobs] == [
        f"seed={seed} steps=5 {rest}"
        for seed in (1, 2)
        for rest in ("mixer=softmax", "mixer=gdn model.linear_head_dim=16", "mixer=gdn model.linear_head_dim=32")
    ]
    assert axes(jobs) == {
        "seed": ["1", "2"],
        "mixer": ["softmax", "gdn"],
        "model.linear_head_dim": [None, "16", "32"],
    }
    assert {job.config.steps for job in jobs} == {5}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_jobs(preset):
    settings, rest = split_words([f"sweep={preset}", "seed=1", "optim.lr=1e-3", "model.linear_head_dim=32"])
    jobs = plan_jobs(settings, rest)
    assert settings.name == preset
    assert len(jobs) > 1
    assert "seed" not in axes(jobs)


@pytest.mark.parametrize("words", [["seed=1,1"], ["micro_batch=1,2"], ["seed=1,2", "run_dir=one"]])
def test_jobs_that_would_share_a_folder_are_refused(words):
    with pytest.raises(UserError, match="would share it"):
        sweep(words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.packing=cut,nope"], r"data\.packing=nope"),
        (["sweep=mixers_tinny"], "Did you mean mixers_tiny"),
        (["n_gpus=0", "seed=1,2"], "n_gpus=0"),
        (["n_gpus=3", "gpus_per_job=2", "seed=1,2"], "no multiple"),
        (["slurm.partitoin=x", "seed=1,2"], r"slurm\.partitoin"),
    ],
)
def test_a_mistake_surfaces_before_the_first_job_runs(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told):
        sweep(words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_takes_more_jobs_but_never_other_ones(tmp_path):
    """A sweep grows, with the logs of the jobs that it had; another one leaves its record alone."""
    settings = SweepConfig(sweep_dir=str(tmp_path / "sweep"))
    open_with = lambda *words: SweepFolder(settings, plan_jobs(settings, [*TINY, *words]))  # noqa: E731
    first = open_with("seed=2,3")
    first.note(0, status="failed", reason="because")
    first.close()
    grown = open_with("seed=1,2,3")
    grown.close()
    logs = {entry["values"]["seed"]: entry["log"] for entry in grown.record["jobs"]}
    assert logs == {"1": "logs/002.log", "2": "logs/000.log", "3": "logs/001.log"}
    assert [entry["reason"] for entry in grown.record["jobs"]] == [None, "because", None]
    kept = (tmp_path / "sweep" / "sweep.json").read_text()
    for _ in range(2):  # the refused sweep has let go of the folder
        with pytest.raises(UserError, match=r"holds another sweep: 2 of its jobs.*not among these"):
            open_with("seed=3,4")
    assert (tmp_path / "sweep" / "sweep.json").read_text() == kept


def test_cards_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    assert places(SweepConfig()) == [["2"]]
    assert places(SweepConfig(n_gpus=4, gpus_per_job=2)) == [["2", "3"], ["5", "7"]]
    assert places(SweepConfig(n_gpus=2, jobs_per_gpu=2)) == [["2"], ["3"], ["2"], ["3"]]
    with pytest.raises(UserError, match="n_gpus=5"):
        places(SweepConfig(n_gpus=5))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert places(SweepConfig(jobs_per_gpu=2)) == [[], []]


def test_the_reason_of_a_failure_is_found_in_its_output(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nbye\n")
    assert reason_of(log, 1).startswith("torch.OutOfMemoryError")
    assert "SIGKILL" in reason_of(log, -9)


def test_a_dry_run_lists_jobs_and_hours(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "mixer=gdn,softmax", "seed=1,2", "steps=10", "dry_run=true", "tokens_per_second=640"]
    assert sweep(words) == 0
    printed = capsys.readouterr().out
    assert "4 jobs, 2,560 tokens to train" in printed
    assert printed.count(" new ") == 4
    assert "given by tokens_per_second" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["preload=true jobs_per_gpu=2", pytest.param("", marks=pytest.mark.slow)])
def test_a_job_that_fails_leaves_the_others_alone_and_the_same_command_goes_on(tmp_path, monkeypatch, capfd, way):
    """Two mixers by two seeds. One job crashes at first, one is stopped halfway: the second time they are done."""
    monkeypatch.chdir(tmp_path)
    words = [
        *TINY,
        "steps=4",
        "data=local",
        "data.path=here.jsonl",
        "data.held_out=0.3",
        "mixer=gdn,softmax",
        "seed=1,2",
    ]
    words += way.split()
    text = "\n".join(json.dumps({"text": "once upon a time " * 20 + str(i)}) for i in range(40))
    Path("here.jsonl").write_text(text)
    jobs = plan_jobs(*split_words(words))
    crashing, halfway = jobs[1], jobs[2]
    crashing.run_dir.parent.mkdir()
    crashing.run_dir.write_text("a file where the run folder should be")
    subprocess.run([sys.executable, "-m", "llm.train", *halfway.words, "stop_after=2"], check=True, capture_output=True)

    assert sweep(words) == 1
    found = record_of(tmp_path)
    assert [job["status"] for job in found["jobs"]] == ["done", "failed", "done", "done"]
    assert found["axes"] == {"mixer": ["gdn", "softmax"], "seed": ["1", "2"]}
    assert "cannot be created" in found["jobs"][1]["reason"]
    assert (
        "continuing from the checkpoint of step 2"
        in (tmp_path / "sweeps").glob("*/logs/002.log").__next__().read_text()
    )
    printed = capfd.readouterr().out
    assert "failed: mixer=gdn seed=2: " in printed

    crashing.run_dir.unlink()
    finished = {job.run_dir: (job.run_dir / "metrics.jsonl").stat().st_mtime_ns for job in jobs if job is not crashing}
    assert sweep(words) == 0
    found = record_of(tmp_path)
    assert [job["status"] for job in found["jobs"]] == ["done"] * 4
    assert [job["starts"] for job in found["jobs"]] == [1, 2, 1, 1]
    assert finished == {folder: (folder / "metrics.jsonl").stat().st_mtime_ns for folder in finished}
    assert all((tmp_path / "sweeps" / "any" / job["run_dir"]).resolve().is_dir() for job in found["jobs"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "preload=true jobs_per_gpu=2", "gpus_per_job=2"])
def test_a_signal_reaches_the_jobs_that_run(tmp_path, way):
    command = [
        sys.executable,
        "-m",
        "llm.train",
        "-m",
        *TINY,
        "mixer=softmax",
        "steps=100000",
        "seed=1,2,3",
        *way.split(),
    ]
    parent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    running = 2 if "preload" in way else 1
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("runs/*/metrics.jsonl"))) < running and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(parent.pid, signal.SIGUSR1)
    printed, _ = parent.communicate(timeout=60)
    assert parent.returncode == 75
    assert f"{3 - running} jobs not begun" in printed
    assert len(list(tmp_path.glob("runs/*/checkpoints/step_*"))) >= running
    assert [job["status"] for job in record_of(tmp_path)["jobs"]] == ["stopped"] * running + ["waiting"] * (3 - running)
