"""Do all ways to compute a training run give one loss curve? As near, at least, as another order of the data does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.compose import compose
from llm.data.batch import IGNORED
from llm.errors import UserError
from llm.layout import layer_names
from llm.runs_equal import metrics_of

REFERENCE = "as configured"
WINDOW = 20  # steps of the running mean; the first of a curve are left out
FULL_LOGITS = "--full-logits"


def path_words(words: Sequence[str]) -> dict[str, list[str]]:
    """Ways to compute the run of `words`, by name: what to add to them."""
    config = compose(words)
    operators = [name for name in dict.fromkeys(layer_names(config)) if "impl" in config.mixers[name]]
    paths = {REFERENCE: [], "eager": ["compile=false"], "full logits": [FULL_LOGITS]}
    if operators:
        paths["plain torch"] = ["compile=false", *(f"mixers.{name}.impl=chunked" for name in operators)]
    return paths


def run_all(runs: Mapping[str, list[str]], folder: Path, *, at_once: int, limit: float) -> dict[str, np.ndarray]:
    """The loss of each step of the runs, by name; each has its folder, and a process of its own."""
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda item: run_one(*item, folder, limit), runs.items())
        return dict(zip(runs, found, strict=True))


def run_one(name: str, words: list[str], folder: Path, limit: float) -> np.ndarray:
    """Train, and read the losses. UserError with the last line where training failed or took too long."""
    run_dir = folder / name.replace(" ", "_")
    command = [sys.executable, "-m", "llm.bench.paths", f"run_dir={run_dir}", "log_every=1", *words]
    with (folder / f"{run_dir.name}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = -1
    if code:
        raise UserError(f"{name}: " + ("took too long" if code < 0 else f"ended with {code}") + f", see {log.name}")
    return np.array([line["loss"] for line in metrics_of(run_dir) if "loss" in line])


def smooth(losses: np.ndarray) -> np.ndarray:
    """The running mean, from where it is one."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


def distance(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How far two curves are apart: running means at most and on average, and single steps on average."""
    apart = np.abs(smooth(one) - smooth(other))
    return {"largest": apart.max(), "mean": apart.mean(), "a step": np.abs(one - other).mean()}


def verdicts(paths: Mapping[str, np.ndarray], orders: Sequence[np.ndarray]) -> list[dict[str, float | str | bool]]:
    """A row for the spread over orders of the data, then one a path: its distance from the reference; is it within?

    The spread is that of the two orders which are closest to one another in the mean, so that none is lucky.
    """
    pairs = [distance(one, other) for one, other in combinations(orders, 2)]
    spread = min(pairs, key=lambda pair: pair["mean"])
    rows = [{"path": "another order of the data", **spread, "within": True}]
    for name, losses in paths.items():
        if name != REFERENCE:
            apart = distance(losses, paths[REFERENCE])
            rows.append({"path": name, **apart, "within": bool(apart["mean"] <= spread["mean"])})
    return rows


def full_logits(hidden_BTD: Tensor, head_weight_WD: Tensor, targets_BT: Tensor, vocab_size: int, **_: object) -> tuple:
    """What `llm.loss.linear_cross_entropy` gives, by torch's own operators on all logits at once."""
    logits = (hidden_BTD @ head_weight_WD.T)[..., :vocab_size].float()
    loss = F.cross_entropy(logits.flatten(0, -2), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets_BT != IGNORED).sum()


def main() -> int:
    """A training run with the words of the command line; `FULL_LOGITS` replaces its loss."""
    from llm.train import main as train

    words = sys.argv[1:]
    if FULL_LOGITS not in words:
        return train(words)
    with mock.patch("llm.loss.linear_cross_entropy", full_logits):
        return train([word for word in words if word != FULL_LOGITS])


def as_json(rows: Sequence[dict[str, float | str | bool]], curves: Mapping[str, np.ndarray]) -> str:
    """Rows and curves, for a file."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return json.dumps({"device": device, "rows": rows, "losses": {n: list(map(float, c)) for n, c in curves.items()}})


if __name__ == "__main__":
    sys.exit(main())
