"""The whole way: a sweep of two mixers by two seeds; one job crashes, one is killed, resumed and reported."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

from llm.compare import images
from llm.compare.__main__ import main
from llm.sweep import sweep
from llm.sweep.jobs import plan_jobs
from llm.sweep.settings import split_words

WORDS = [
    "model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16", "model.linear_head_dim=16",
    "model.parameters=40000", "context=32", "batch_tokens=64", "eval.max_rows=1", "eval.every=10", "checkpoint.every=5",
    "log_every=5", "steps=40", "logger=jsonl", "mixer=gdn,softmax", "seed=1,2", "preload=true", "jobs_per_gpu=2",
]  # fmt: skip


def kill_after_its_first_checkpoint(run_dir):
    """SIGKILL to the process that the run's lock names, while it trains."""
    deadline = time.monotonic() + 60
    while not list(run_dir.glob("checkpoints/step_*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(json.loads((run_dir / "run.lock").read_text())["pid"], signal.SIGKILL)


def test_from_a_sweep_with_accidents_to_its_report(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(images, "available", lambda: False)  # they take time, and have a test of their own
    jobs = plan_jobs(*split_words(WORDS))
    killed, crashing = jobs[0], jobs[3]
    crashing.run_dir.parent.mkdir()
    crashing.run_dir.write_text("a file where the run folder should be")
    assassin = threading.Thread(target=kill_after_its_first_checkpoint, args=(killed.run_dir,))
    assassin.start()
    assert sweep(WORDS) == 1
    assassin.join()
    (folder,) = tmp_path.glob("sweeps/*")
    capfd.readouterr()
    assert main(["--follow", "--once", str(folder)]) == 0
    assert "died: process" in capfd.readouterr().out

    assert sweep(WORDS) == 1  # the killed job goes on; the other crashes again
    assert main([str(folder), "--out", "report"]) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    gdn, softmax = report["contenders"]
    assert (gdn["label"], gdn["n"], softmax["label"], softmax["n"]) == ("gdn", 2, "softmax", 1)
    assert gdn["notes"] == ["seed 1 resumed 1x"]
    assert softmax["notes"] == ["seed 2 missing"]
    assert not report["differences"][0]["differs"]  # one pair: nothing can be told
    (left_out,) = report["skipped"]
    assert "failed" in left_out["reason"]
    assert "cannot be created" in left_out["reason"]
    matters = {row["matter"] for row in report["unlike"]}
    assert not matters & {"tokens", "data and their order", "tokenizer", "optimizer and schedule"}
    assert {curve["name"] for curve in report["plots"][0]["curves"]} == {"gdn", "softmax"}
