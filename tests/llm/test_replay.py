"""Replay of a recorded step, true and falsified."""

from __future__ import annotations

import json

import pytest

from llm import replay, train

WORDS = [
    "mixer=gla", "model=tiny", "model.d_model=32", "model.n_layers=2", "model.head_dim=16", "model.linear_head_dim=16",
    "model.parameters=30000", "logger=jsonl", "data=local", "data.path=bundled:val.jsonl", "data.mode=stream",
    "data.held_out=0", "context=32", "batch_tokens=128", "steps=6", "log_every=2", "eval.every=0", "checkpoint.every=2",
]  # fmt: skip


def test_a_recorded_step_is_met_or_not(tmp_path, capsys):
    run = tmp_path / "run"
    assert train.main([*WORDS, f"run_dir={run}"]) == 0
    before = sorted(p.stat().st_mtime_ns for p in run.rglob("*"))
    for step, last in ((5, 6), (6, 6), (1, 1)):  # from a checkpoint, and from the start
        assert replay.main([str(run), "--step", str(step)]) == 0
        assert f"up to step {last} meets the recorded metrics exactly" in capsys.readouterr().out
    assert sorted(p.stat().st_mtime_ns for p in run.rglob("*")) == before, "the run is only read"

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["loss"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay.main([str(run), "--step", "6"]) == 1
    assert "step 6 loss: recorded" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["0", "9"])
def test_a_step_that_the_run_has_not(tmp_path, capsys, step):
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "loss": 1.0}\n')
    assert replay.main([str(tmp_path), "--step", step]) == 2
    assert "recorded steps 1 to 6" in capsys.readouterr().err
