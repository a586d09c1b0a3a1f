"""Activation checkpointing changes memory, not gradients."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from llm.compose import groups
from llm.data.batch import Batch
from llm.loss import NextTokenLoss
from mixer_kernels.segments import Segments

CHOICES = ("none", "selective", "full")


def batch_of(rows=2, tokens=24):
    ids = torch.randint(50, (rows, tokens))
    starts = torch.zeros(rows, tokens, dtype=torch.bool)
    starts[:, [0, 7, 8]] = True
    return Batch(ids, ids.roll(-1, 1), Segments.from_starts(starts).row_start)


def gradients(model, batch):
    model.zero_grad()
    NextTokenLoss(model)(batch).objective.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def choose(model, checkpointing):
    for block in model.layers:
        block.checkpointing = checkpointing
    return model


def kept_bytes(model, batch):
    """What autograd holds between forward and backward. Selective checkpoints keep more beside it."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(batch.tokens, batch.segments)
    return sum(kept.values())


@pytest.mark.parametrize("mixer", groups()["mixer"])
def test_gradients_are_the_same_with_any_choice(make_model, mixer):
    model, batch = make_model(mixer).train(), batch_of()
    expected = gradients(choose(model, "none"), batch)
    for checkpointing in ("selective", "full"):
        found = gradients(choose(model, checkpointing), batch)
        assert all(torch.equal(found[name], expected[name]) for name in expected), checkpointing


def test_less_is_kept(make_model):
    model, batch = make_model("softmax").train(), batch_of()
    none, selective, full = (kept_bytes(choose(model, c), batch) for c in CHOICES)
    assert full < selective < none
    assert full < 0.3 * none


def test_products_are_not_done_again(make_model):
    """Selective: of the mixer's products none runs twice, of the MLP's the first two."""
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = make_model("softmax").train(), batch_of()
    flops = {}
    for checkpointing in CHOICES:
        choose(model, checkpointing)
        with FlopCounterMode(display=False) as counter:
            gradients(model, batch)
        flops[checkpointing] = counter.get_total_flops()
    mlp = 2 * 3 * batch.tokens.numel() * sum(b.mlp.gate_proj.weight.numel() for b in model.layers)
    assert flops["selective"] - flops["none"] == pytest.approx(mlp * 2 / 3)
    assert flops["full"] > flops["selective"]


@pytest.mark.parametrize("checkpointing", CHOICES)
@pytest.mark.parametrize("mixer", ["gdn", "softmax"])
def test_it_goes_with_compiled_blocks(make_model, mixer, checkpointing):
    model, batch = choose(make_model(mixer).train(), checkpointing), batch_of()
    expected = gradients(model, batch)
    torch._dynamo.reset()
    counters.clear()
    for block in model.layers:
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    found = gradients(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1, "one graph for all layers"
    torch._dynamo.reset()
