"""Other ways for blocks to reach later blocks."""

from __future__ import annotations

import pytest
import torch

from llm.build import build_model
from llm.compose import compose
from mixer_kernels import Segments

OTHERS = ["delta_attention", "value_routing"]


def _whole(count: int) -> Segments:
    return Segments.whole_rows(1, count)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape)


@pytest.fixture
def make_other(make_model):
    """make_other(layout, residual): a model whose residuals have been away from their start."""

    def make(layout: str, residual: str):
        model = make_model(layout, f"residual={residual}")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "queries" in name or "value_route" in name:
                    parameter.normal_(std=0.2)
        return model

    return make


@pytest.mark.parametrize("residual", OTHERS)
def test_begins_as_the_standard_one(residual, make_model):
    model, plain, x = (
        make_model("hybrid_gdn_1to1", f"residual={residual}"),
        make_model("hybrid_gdn_1to1"),
        tokens(2, 20),
    )
    if residual == "delta_attention":  # the other has smaller MLPs
        weights = {n: p for n, p in model.state_dict().items() if not n.startswith("residual.")}
        plain.load_state_dict(weights)
        torch.testing.assert_close(model(x).hidden, plain(x).hidden)
    extra = [p for n, p in model.named_parameters() if "queries" in n or "value_route" in n]
    assert len(extra) >= 4
    assert all((p == 0).all() for p in extra)


def test_delta_attention_is_a_weighted_sum_of_increments(make_other):
    """Two blocks and the final norm, written out."""
    model, x = make_other("gdn", "delta_attention"), tokens(1, 9)
    increments, inputs = [model.embeddings(x)], []
    for query, layer in zip(model.residual.queries, [*model.layers, None], strict=True):
        scored = [(v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * query).sum(-1) for v in increments]
        weights = torch.stack([*scored, torch.zeros_like(scored[0])]).softmax(0)
        inputs.append(sum(w[..., None] * v for w, v in zip(weights, increments, strict=False)) * len(weights))
        if layer is not None:
            increments.append(layer(inputs[-1], _whole(9)).y - inputs[-1])
    torch.testing.assert_close(model(x).hidden, model.norm(inputs[-1]))


def test_value_routing_adds_what_the_mixer_writes(make_other):
    model = make_other("gdn", "value_routing")
    mixer, x = model.layers[1].mixer, torch.randn(1, 9, 64, dtype=torch.float64)
    routed = mixer(x, _whole(9)).y
    values, _ = mixer.v_conv1d(mixer.v_proj(x), _whole(9))
    route, mixer.value_route = mixer.value_route, None
    torch.testing.assert_close(routed, mixer(x, _whole(9)).y + values @ route.weight.T)


@pytest.mark.parametrize("stack", ["hybrid_gdn_1to1", "rwkv7", "hydrahead", "deltaproduct", "fox"])
@pytest.mark.parametrize("residual", OTHERS)
def test_forward_equals_steps_and_all_learns(residual, stack, make_other):
    model, x = make_other(stack, residual), tokens(2, 12)
    whole = model.logits(model(x).hidden)
    state = model.init_state(2, 12, dtype=torch.float64)
    for t in range(12):
        logits, state = model.step(x[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], rtol=1e-8, atol=1e-8)
    whole.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("residual", OTHERS)
@pytest.mark.parametrize("stack", ["gdn", "hybrid_kda_3to1"])
def test_sizes_match(residual, stack):
    config = compose([f"mixer={stack}", f"residual={residual}", "model=340m"])
    model = build_model(config, 1000, "meta")
    assert abs(model.non_embedding_parameters() / config.model.parameters - 1) < 0.01
