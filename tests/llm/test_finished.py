"""When a run is finished, and that it ends when it is good enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm.compose import compose
from llm.finished import is_finished, is_good_enough
from llm.train import main

TASK = ["model=task", "mixer=softmax", "model.d_model=64", "model.parameters=90000", "data=mqar", "tokenizer=task",
        "data.source.vocabulary=16", "data.source.pairs=[1,2]", "context=16", "batch_tokens=64", "steps=6",
        "eval.every=2", "eval.max_rows=8", "logger=jsonl"]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_training_ends_once_every_set_is_good_enough(run_dir):
    words = [*TASK, f"run_dir={run_dir}", "eval.enough_accuracy=1e-6"]  # whatever is right at all will do
    words += ["data.source.vocabulary=4", "data.source.pairs=[1,2]"]  # two values: half is right by chance
    assert main(words) == 0
    assert steps_of(run_dir)[-1] == 2
    assert is_finished(compose(words), run_dir)
    assert not is_finished(compose([*words, "eval.enough_accuracy=null"]), run_dir)
    assert main(words) == 0  # and it does not go on
    assert steps_of(run_dir)[-1] == 2
    assert main([*words, "eval.enough_accuracy=1.0"]) == 0
    assert steps_of(run_dir)[-1] == 6


def test_the_last_step_and_stop_after_are_ends(run_dir):
    words = [*TASK, f"run_dir={run_dir}"]
    assert not is_finished(compose(words), run_dir)
    assert main([*words, "stop_after=3"]) == 0
    assert not is_finished(compose(words), run_dir)
    assert is_finished(compose([*words, "stop_after=3"]), run_dir)
    assert main(words) == 0
    assert is_finished(compose(words), run_dir)


def test_all_accuracies_count():
    assert is_good_enough(0.9, {"val_accuracy": 0.95, "val_pairs_4_accuracy": 0.9, "loss": 0.1})
    assert not is_good_enough(0.9, {"val_accuracy": 0.95, "val_pairs_4_accuracy": 0.89})
    assert not is_good_enough(None, {"val_accuracy": 1.0})
    assert not is_good_enough(0.9, {})
