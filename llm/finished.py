"""When is a run finished? Read from its folder, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from llm.config import TrainConfig
from llm.schedules import total_steps


def is_finished(config: TrainConfig, run_dir: Path) -> bool:
    """Has the run of `config` in `run_dir` nothing left to do: its last step done, validated and saved?

    So has one that reached `eval.enough_accuracy` before, and one that reached `stop_after`.
    """
    newest = max(run_dir.glob("checkpoints/step_*/state.json"), default=None)
    if newest is None:
        return False
    try:
        state = json.loads(newest.read_text())
        step, reported, latest = state["step"], state["reported"], state["latest"]
    except (OSError, ValueError, KeyError, TypeError):
        return False  # whatever is wrong with it, the trainer finds another checkpoint or says so
    last = min(config.stop_after or total_steps(config), total_steps(config))
    return reported and (step >= last or is_good_enough(config.eval.enough_accuracy, latest))


def is_good_enough(enough: float | None, latest: Mapping[str, float]) -> bool:
    """Has every accuracy among the newest values of a run's metrics reached `enough` (None: never)?"""
    accuracies = [value for name, value in latest.items() if name.endswith("_accuracy")]
    return enough is not None and bool(accuracies) and min(accuracies) >= enough
