"""Norms by layer, and what they point at."""

from __future__ import annotations

import math

import pytest
import torch

from llm.data.batch import Batch
from llm.loss import NextTokenLoss
from llm.probes import forward_statistics, gradient_norms
from mixer_kernels.segments import Segments


def batch_of(rows=3, tokens=9):
    ids = torch.randint(50, (rows, tokens))
    return Batch(ids, ids.roll(-1, 1), Segments.whole_rows(rows, tokens).row_start)


def test_gradient_norms_by_layer_add_up(make_model):
    model = make_model("hybrid_gdn_1to1", dtype=torch.float32)
    NextTokenLoss(model)(batch_of())[0].backward()
    norms = gradient_norms(model)
    assert norms.keys() == {f"grad_norm/{part}" for part in ("embeddings", *(f"layers.{i}" for i in range(4)), "norm")}
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(sum(norm**2 for norm in norms.values()) ** 0.5, whole.item(), rtol=1e-5, atol=0)


def test_statistics_find_the_layer_that_blows_up(make_model, layout):
    model = make_model(layout, dtype=torch.float32)
    batch = batch_of()
    before = forward_statistics(model, batch)
    assert {f"activation_rms/layers.{i}" for i in range(4)} <= before.keys()
    assert any(name.startswith("state_rms/layers.0/") for name in before)
    with torch.no_grad():
        model.layers[2].mlp.down_proj.weight.mul_(1e3)
    after = forward_statistics(model, batch)
    assert after["activation_rms/layers.1"] == before["activation_rms/layers.1"]
    assert after["activation_rms/layers.2"] > 10 * before["activation_rms/layers.2"]


@pytest.mark.parametrize("mixer", ["gdn", "kda", "gla"])
def test_log_decays_are_those_of_the_gates(make_model, mixer):
    model = make_model(mixer, dtype=torch.float32)
    found = forward_statistics(model, batch_of())
    for i in range(4):
        low, mean, high = (found[f"log_decay_{x}/layers.{i}/recurrent"] for x in ("min", "mean", "max"))
        assert low < mean < high <= 0
    with torch.no_grad():
        for parameter in model.layers[1].mixer.parameters():
            parameter.zero_()  # A = 1 and softplus(0) = log 2; or logsigmoid(0) / 16
    expected = -math.log(2) / (16 if mixer == "gla" else 1)
    after = forward_statistics(model, batch_of())
    assert after["log_decay_min/layers.1/recurrent"] == pytest.approx(expected, rel=1e-5)
    assert after["log_decay_max/layers.1/recurrent"] == pytest.approx(expected, rel=1e-5)
    assert all(block.mixer.watch is None for block in model.layers)
