"""Several processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from llm.checkpoint import Checkpoints


@pytest.mark.slow
def test_two_ranks_are_one_rank_with_accumulation(train, words, tmp_path, assert_same_curve):
    """Five steps on two ranks and the rest on one, and the other way round, against one rank all the way."""
    train("one", "log_every=1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    subprocess.run([*torchrun, *words("two_one", "log_every=1", "stop_after=5")], check=True, timeout=300)
    assert len(load_file(Checkpoints(tmp_path / "two_one").path(5) / "rng.safetensors")) == 10, "two ranks' generators"
    train("two_one", "log_every=1")
    train("one_two", "log_every=1", "stop_after=5")
    subprocess.run([*torchrun, *words("one_two", "log_every=1")], check=True, timeout=300)
    for other in ("two_one", "one_two"):
        assert_same_curve(tmp_path / "one", tmp_path / other)
