"""Ten kills, and the comparison that they are judged by."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import torch

from llm.chaos import BEGIN, END, FAULTS
from llm.checkpoint import Checkpoints, Snapshot
from llm.config import CheckpointConfig
from llm.runs_equal import differences_of_runs, main


def test_ten_kills(tmp_path):
    """The table of docs/reliability.md in small: every fault at least once."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    command = [sys.executable, "-m", "llm.chaos", "--kills=10", f"--out={tmp_path}/chaos", f"--into={page}"]
    command += ["steps=16", "checkpoint.every=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "chaos" / "log").read_text()[-4000:]
    rows = re.findall(r"^\| (.+) \| (\d+) \| (\d+) \| (.*?) ?\|$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == [*FAULTS, "all"]
    assert rows[-1][2] == "10", "attempts cut short"
    assert all(int(tried) >= 1 and outcome == "bitwise equal" for _, tried, _, outcome in rows[:-1])
    assert page.read_text() == f"before\n{BEGIN}\n{done.stdout.strip()}\n{END}\nafter\n"


def save(run_dir, weight, loss):
    tensors = {"w": torch.tensor(weight)}
    Checkpoints(run_dir).save(Snapshot(tensors, {}, {}, {"step": 1}), CheckpointConfig())
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "tokens_per_second": weight}) + "\n")


def test_a_difference_of_one_bit_is_found(tmp_path, capsys):
    for name, weight, loss in (("a", 0.0, 1.0), ("b", 0.0, 1.0), ("c", -0.0, 1.0), ("d", 0.0, 1.5)):
        save(tmp_path / name, weight, loss)
    assert differences_of_runs(tmp_path / "a", tmp_path / "b") == []
    assert differences_of_runs(tmp_path / "a", tmp_path / "c") == ["model: w"]
    assert differences_of_runs(tmp_path / "a", tmp_path / "d") == ["metrics.jsonl"]
    folders = [str(tmp_path / name) for name in "abc"]
    assert main(folders[:2]) == 0
    assert "the same bit for bit: 1 lines of metrics, and weights" in capsys.readouterr().out
    assert main(folders[1:]) == 1
    assert "DIFFER:\n  model: w" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2
