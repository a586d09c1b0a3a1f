"""Run folders as training writes them, with numbers made up: nothing is trained here."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from llm.compose import compose
from llm.config import TrainConfig
from llm.identity import SCHEMA_VERSION

STEPS, EVERY = 200, 10
SIZES = {"gdn": 1.00, "kda": 1.002, "gla": 0.998, "softmax": 1.001}

_composed: dict[tuple[str, ...], TrainConfig] = {}


def settings_of(*words: str) -> dict:
    """The resolved configuration of a command line, as config.yaml holds it."""
    if words not in _composed:
        _composed[words] = compose(list(words))
    stored = OmegaConf.to_container(OmegaConf.structured(_composed[words]), resolve=True)
    return {"schema_version": SCHEMA_VERSION, **stored}


def metric_lines(loss: float, *, seed: int, steps: int, batch_tokens: int, speed: float) -> list[dict]:
    """A loss that falls to `loss` at STEPS; the noise of a step is shared by all runs of a seed, as the data are."""
    noise = random.Random(seed)
    lines = []
    for step in [1, *range(EVERY, steps + 1, EVERY)]:
        value = loss + 6 * math.exp(-9 * step / STEPS) + noise.gauss(0, 0.02) * (step < STEPS)
        line = {"step": step, "loss": value, "tokens": step * batch_tokens, "tokens_per_second": speed}
        if step % 50 == 0:
            line |= {"val_loss": value + 0.05, "val_accuracy": 1 / value, "eta_seconds": float(STEPS - step)}
        lines.append(line)
    return lines


@pytest.fixture
def make_folder(tmp_path):
    """make_folder(mixer, seed=, loss=, ...): writes a run folder and returns it; see the code for what can be said."""

    def make(
        mixer: str = "gdn",
        *overrides: str,
        seed: int = 1,
        loss: float = 3.0,
        steps: int | None = None,
        speed: float = 100_000.0,
        commit: str = "a" * 40,
        starts: int = 1,
        facts: dict | None = None,
        evaluations: list[dict] | None = None,
        name: str | None = None,
        inside: str = "runs",
    ) -> Path:
        settings = settings_of(f"mixer={mixer}", "context=128", "batch_tokens=1024", *overrides)
        settings |= {"seed": seed, "steps": STEPS}
        folder = tmp_path / inside / (name or "-".join([mixer, str(seed), *overrides]).replace("/", "_"))
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        lines = metric_lines(loss, seed=seed, steps=steps or STEPS, batch_tokens=settings["batch_tokens"], speed=speed)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        start = {"started": "2026-01-01T00:00:00+0000", "host": "h", "devices": ["NVIDIA H200"], "packages": {}}
        start["git"] = {"commit": commit, "changed": []}
        (folder / "environment.json").write_text(json.dumps([start] * starts))
        (folder / "model.json").write_text(json.dumps(facts or facts_of(mixer)))
        if evaluations is not None:
            (folder / "evaluations").mkdir()
            content = {"schema_version": 1, "step": STEPS, "series": evaluations}
            (folder / "evaluations" / "all.json").write_text(json.dumps(content))
        return folder

    return make


def facts_of(mixer: str) -> dict:
    """Sizes as they might be: state that grows with the share of softmax layers."""
    family = next((name for name in SIZES if name in mixer and name != "softmax"), "softmax")
    ratio = {"3to1": 0.25, "1to1": 0.5}.get(mixer.rpartition("_")[2], float(family == "softmax"))
    elements = {} if family == "softmax" else {family: 131_072}
    return {
        "parameters": round(370e6 * SIZES[family]),
        "non_embedding_parameters": round(340e6 * SIZES[family]),
        "flops_a_token": 2.4e9 * (1 + 0.2 * ratio),
        "state_bytes": int(24 * (524_288 * (1 - ratio) + 16_777_216 * ratio)),
        "state_elements": elements | ({"softmax": 0} if ratio else {}),
    }


@pytest.fixture
def sweep(make_folder) -> Path:
    """Three seeds of five contenders: gdn is worse than its 3:1 hybrid beyond chance, gla as good as gdn but luck."""
    quality = {"softmax": 3.00, "gdn": 3.05, "gla": 3.052, "hybrid_gdn_3to1": 2.95, "hybrid_gdn_1to1": 2.97}
    speeds = {"softmax": 90e3, "gdn": 120e3, "gla": 130e3, "hybrid_gdn_3to1": 112e3, "hybrid_gdn_1to1": 105e3}
    for mixer, loss in quality.items():
        own = random.Random(mixer)
        for seed in (1, 2, 3):
            value = loss + 0.01 * seed + own.gauss(0, 0.003)
            folder = make_folder(mixer, seed=seed, loss=value, speed=speeds[mixer], evaluations=series_of(mixer, value))
    return folder.parent


def series_of(mixer: str, loss: float) -> list[dict]:
    """What an evaluation might find."""
    softmax = mixer == "softmax"
    grows = [[128 * 2**i, loss + 0.05 - 0.02 * i + (0.3 * i * i if softmax else 0)] for i in range(5)]
    return [
        {"measure": "loss_by_length", "name": "validation", "points": grows},
        {"measure": "loss_by_position", "name": "validation", "points": [[2**i, loss + 1 / (i + 1)] for i in range(8)]},
        {
            "measure": "recall_by_length",
            "name": "needle",
            "points": [[128 * 2**i, 3 / (3 + i * loss)] for i in range(4)],
        },
        {"measure": "recall", "name": "needle", "points": [[0, 1 / loss]]},
        {
            "measure": "decoding_tokens_per_second",
            "name": "batch 1",
            "points": [[1024 * 4**i, 900 / (1 + i * softmax)] for i in range(4)] + [[10**6, None]],
        },
    ]
