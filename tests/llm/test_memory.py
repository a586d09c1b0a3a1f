"""The estimate of memory: what it counts is what is kept."""

from __future__ import annotations

import pytest
import torch

from llm.build import build_model
from llm.memory import Memory, _bytes_kept, training_memory
from llm.report import report
from mixer_kernels.segments import Segments

CHOICES = ("none", "selective", "full")


def saved_bytes(block, tokens):
    """What a real block of this size keeps in bf16 autocast, its weights aside."""
    weights, kept = {p.untyped_storage().data_ptr() for p in block.parameters()}, {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x_BTD = torch.randn(1, tokens, block.mixer.d_model, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = block(x_BTD, Segments.whole_rows(1, tokens)).y
    foreign = {*weights, x_BTD.untyped_storage().data_ptr()}
    return sum(size for place, size in kept.items() if place not in foreign) + y.untyped_storage().nbytes()


def test_it_counts_what_a_real_block_keeps(make_model):
    block = make_model("softmax", dtype=torch.float32).train().layers[0]
    counted = _bytes_kept(block, 256, "none", compiled=False)
    assert counted == pytest.approx(saved_bytes(block, 256), rel=0.02)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("mixer", ["softmax", "gla", "hybrid_kda_1to1"])
def test_choices_keep_less_and_less(make_config, mixer, compiled):
    config = make_config(mixer, f"compile={compiled}")
    model = build_model(config, 50, "meta")
    none, selective, full = (training_memory(config, model, choice) for choice in CHOICES)
    assert full.by_token < selective.by_token < none.by_token


def test_the_largest_micro_batch_is_the_largest_that_fits():
    device = 100 * 2**20
    for loss in (1e6, 40e6):  # the backward pass has the peak, or the loss
        memory = Memory(fixed=10 * 2**20, by_token=1000.0, loss=loss, backward_by_token=100.0)
        rows = memory.largest_micro_batch(256, device)
        assert memory.at(rows * 256) <= 0.92 * device < memory.at((rows + 1) * 256)
        assert memory.largest_micro_batch(256, 2**20) == 0


def test_a_dry_run_says_it(make_config):
    config = make_config("gdn", "micro_batch=4")
    page = str(report(config, build_model(config, 50, "meta"), 10))
    for choice in CHOICES:
        assert f"activation_checkpointing={choice}" in page
    assert "at micro_batch=4; largest micro_batch" in page
