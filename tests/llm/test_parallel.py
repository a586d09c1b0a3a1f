"""Several processes, over gloo: one loss curve, checkpoints that know nothing of who wrote them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llm.checkpoint import Checkpoints
from llm.errors import UserError
from llm.parallel import build_accelerator, group_size
from llm.runs_equal import differences_of_runs

CONFTEST = Path(__file__).with_name("conftest.py")

# What torchrun starts: small runs one after the other, with the trainer that the other tests have.
RANK = """
import importlib.util, json, sys
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

spec = importlib.util.spec_from_file_location("small_runs", sys.argv[1])
small_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small_runs)
for words in json.loads(sys.argv[2]):
    trainer = small_runs._make_trainer(words)
    sharded = [isinstance(p, DTensor) for p in trainer.model.parameters()]
    wanted = trainer.config.parallel != "ddp"
    assert sharded == [wanted] * len(sharded)
    assert all(isinstance(block, FSDPModule) == wanted for block in trainer.model.layers)
    trainer.fit()
"""


@pytest.fixture
def two_ranks(tmp_path):
    """two_ranks(words, ...): these small runs, one after the other, on two processes."""

    def run(*commands):
        script = tmp_path / "rank.py"
        script.write_text(RANK)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run(
            [*torchrun, str(CONFTEST), json.dumps(commands)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return run


def test_ranks_are_accumulation_and_checkpoints_fit_any_of_them(train, words, two_ranks, tmp_path, assert_same_curve):
    """Two ranks, one rank with twice the passes, sharded or not, and every change between them along the way."""
    train("one", "log_every=1")
    train("one_two", "log_every=1", "stop_after=5")
    two_ranks(
        words("ddp", "log_every=1"),
        words("ddp_one", "log_every=1", "stop_after=5"),
        words("fsdp", "log_every=1", "parallel=fsdp", "probe_every=2"),
        words("parts", "log_every=1", "parallel=fsdp", "probe_every=2", "stop_after=5"),
        words("parts", "log_every=1", "parallel=fsdp", "probe_every=2"),
        words("fsdp_ddp", "log_every=1", "parallel=fsdp", "stop_after=3"),
        words("fsdp_ddp", "log_every=1", "parallel=ddp", "stop_after=6"),
        words("fsdp_ddp", "log_every=1", "parallel=hsdp", "shard_over=1", "activation_checkpointing=selective"),
        words("one_two", "log_every=1", "parallel=fsdp", "activation_checkpointing=full"),
    )  # fmt: skip
    train("ddp_one", "log_every=1")
    assert len(load_file(Checkpoints(tmp_path / "ddp").path(8) / "rng.safetensors")) == 10, "two ranks' generators"
    assert not differences_of_runs(tmp_path / "fsdp", tmp_path / "parts"), "a sharded run resumes bitwise"
    for other in ("ddp", "ddp_one", "fsdp_ddp", "one_two"):
        assert_same_curve(tmp_path / "one", tmp_path / other)


@pytest.mark.slow
def test_muon_over_shards_is_muon(train, words, two_ranks, tmp_path, assert_same_curve):
    settings = ["optim=muon", "optim.lr=0.01", "log_every=1"]
    train("one", *settings)
    two_ranks(
        words("fsdp", *settings, "parallel=fsdp"),
        words("parts", *settings, "parallel=fsdp", "stop_after=3"),
        words("parts", *settings, "parallel=fsdp"),
    )
    assert not differences_of_runs(tmp_path / "fsdp", tmp_path / "parts")
    assert_same_curve(tmp_path / "one", tmp_path / "fsdp", rel=3e-3)  # its bf16 products round other sums


def test_groups_of_shards_divide_the_processes(make_config):
    config = make_config("gdn", "parallel=hsdp", "shard_over=3")
    assert group_size(config, 6) == 3
    with pytest.raises(UserError, match="shard_over=3: does not divide the 8 processes"):
        group_size(config, 8)
    assert [group_size(make_config("gdn", f"parallel={kind}"), 8) for kind in ("ddp", "fsdp")] == [1, 8]


def test_accelerate_must_not_shard_beside_it(make_config, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"accelerate is set up for FSDP.*parallel=fsdp"):
        build_accelerator(make_config("gdn"))
