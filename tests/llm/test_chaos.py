"""Ten kills, and the comparison that they are judged by."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from llm.checkpoint import Checkpoints, Snapshot
from llm.config import CheckpointConfig
from llm.runs_equal import differences_of_runs



def test_ten_kills(tmp_path):
    command = [sys.executable, "-m", "llm.chaos", "--kills", "10", "--out", str(tmp_path / "chaos")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 10 |" in done.stdout


def save(run_dir, weight, loss):
    tensors = {"w": torch.tensor(weight)}
    Checkpoints(run_dir).save(Snapshot(tensors, {}, {}, {"step": 1}), CheckpointConfig())
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "tokens_per_second": weight}) + "\n")


def test_a_difference_of_one_bit_is_found(tmp_path):
    for name, weight, loss in (("a", 0.0, 1.0), ("b", 0.0, 1.0), ("c", -0.0, 1.0), ("d", 0.0, 1.5)):
        save(tmp_path / name, weight, loss)
    assert differences_of_runs(tmp_path / "a", tmp_path / "b") == []
    assert differences_of_runs(tmp_path / "a", tmp_path / "c") == ["model: w"]
    assert differences_of_runs(tmp_path / "a", tmp_path / "d") == ["metrics.jsonl"]
