"""Loading a trained model back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import llm
from llm.build import build_model
from llm.errors import UserError


def test_loads_model_tokenizer_and_config_of_a_step(make_run, make_config):
    run = make_run("hybrid_gdn_1to1", steps=(1, 2))
    for step, seed in ((1, 1), (2, 2), ("2", 2), (None, 2), ("best", 1)):
        model, tokenizer, config = llm.load_run(run, step)
        expected = build_model(make_config("hybrid_gdn_1to1", "model.init_std=0.2", f"seed={seed}"), len(tokenizer))
        for name, tensor in expected.state_dict().items():
            assert model.state_dict()[name].equal(tensor), name
        assert not model.training
    assert config.hybrid.linear == "gdn"
    ids = torch.tensor([tokenizer("Once upon a time")["input_ids"]])
    assert model.logits(model(ids).hidden).isfinite().all()


def test_mistakes_are_explained(make_run, tmp_path):
    run = make_run("softmax", steps=(3, 5))
    with pytest.raises(UserError, match="no such folder"):
        llm.load_run(tmp_path / "absent")
    with pytest.raises(UserError, match=r"step 4: .* It has: 3, 5\."):
        llm.load_run(run, 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no checkpoint"):
        llm.load_run(tmp_path / "empty")
    weights = run / "checkpoints" / "step_00000005" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"hash.*Give another one by --step: the other steps are 3\.$"):
        llm.load_run(run)
    llm.load_run(run, 3)
    (run / "checkpoints" / "step_00000003").rename(tmp_path / "aside")
    with pytest.raises(UserError, match=r"hash.*there is no other checkpoint\.$"):
        llm.load_run(run)


def test_only_the_files_of_the_model_have_to_be_whole(make_run):
    run = make_run("softmax")
    checkpoint = run / "checkpoints" / "step_00000001"
    (checkpoint / "optimizer.safetensors").write_bytes(b"damaged")
    (checkpoint / "rng.safetensors").unlink()
    llm.load_run(run)


def test_import_is_light():
    code = "import llm, sys; assert 'torch' not in sys.modules; assert 'load_run' in llm.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)
