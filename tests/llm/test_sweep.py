"""Sweeps: what they run, what they refuse, how they stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from llm.errors import UserError
from llm.sweep import jobs, sweep

TINY = ["model.d_model=32", "model.n_layers=1", "model.head_dim=16", "model.parameters=20000", "context=32",
        "batch_tokens=64", "eval.max_rows=1", "logger=jsonl", "mixer=softmax"]  # fmt: skip


def test_jobs_are_the_product_of_the_values():
    assert jobs(["mixer=gdn,kda", "pattern=[gdn,softmax]", "seed=range(2)"]) == [
        [f"mixer={m}", "pattern=[gdn,softmax]", f"seed={s}"] for m in ("gdn", "kda") for s in (0, 1)
    ]


@pytest.mark.parametrize("words", [["seed=1,1"], ["micro_batch=1,2"], ["seed=1,2", "run_dir=one"]])
def test_jobs_that_would_share_a_folder_are_refused(words):
    with pytest.raises(UserError, match="would share it"):
        sweep(words)


def test_a_mistake_in_a_later_job_surfaces_before_the_first_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data\.packing=nope"):
        sweep(["data.packing=cut,nope"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_that_fails_leaves_the_others_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert sweep([*TINY, "steps=1", "data.path=bundled:train.jsonl,gone.jsonl"]) == 1
    printed = capfd.readouterr().out
    assert "done" in printed
    assert "failed" in printed


@pytest.mark.slow
def test_a_signal_reaches_the_job_that_runs(tmp_path):
    command = [sys.executable, "-m", "llm.train", "-m", *TINY, "steps=100000", "seed=1,2"]
    parent = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(parent.pid, signal.SIGTERM)
    printed, _ = parent.communicate(timeout=60)
    assert parent.returncode == 75
    assert "1 jobs not begun" in printed
    assert len(list(tmp_path.glob("runs/*/checkpoints/step_*"))) >= 1
