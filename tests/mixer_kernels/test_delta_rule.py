"""What is particular to the delta rule: the published recurrences it stands for, and its triangular inverse."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.nn.functional import normalize

from mixer_kernels import delta_rule, delta_rule_step
from mixer_kernels.delta_rule.chunked import CHUNK, inverse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
B, T, H, K, V = 2, 70, 2, 8, 6


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(micro_steps=1):
    q, k = normalize(draw(B, T, H, K, seed=1), dim=-1), normalize(draw(B, T * micro_steps, H, K, seed=2), dim=-1)
    return q, k, draw(B, T * micro_steps, H, V, seed=3), 2 * draw(B, T * micro_steps, H, seed=4).sigmoid()


def loop(q, update):
    """o_t = S_t^T q_t / sqrt(K), with S_t = update(t, S_{t-1})."""
    state, out = torch.zeros(B, H, K, V, dtype=torch.float64), []
    for t in range(T):
        state = update(t, state)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * K**-0.5)
    return torch.stack(out, 1), state


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def outer(a, b):
    return a[..., :, None] * b[..., None, :]


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_deltanet(impl):
    """S_t = S_{t-1} (I - beta k k^T) + beta v k^T (arXiv 2406.06484), transposed."""
    q, k, v, beta = qkv()

    def update(t, state):
        erase = torch.eye(K, dtype=torch.float64) - beta[:, t, :, None, None] * outer(k[:, t], k[:, t])
        return erase @ state + beta[:, t, :, None, None] * outer(k[:, t], v[:, t])

    assert_same(delta_rule(q, k, v, beta=beta, impl=impl), loop(q, update))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_gated_deltanet(impl):
    """S_t = alpha S_{t-1} (I - beta k k^T) + beta v k^T (arXiv 2412.06464), transposed."""
    q, k, v, beta = qkv()
    g = -draw(B, T, H, seed=5).abs()

    def update(t, state):
        erase = torch.eye(K, dtype=torch.float64) - beta[:, t, :, None, None] * outer(k[:, t], k[:, t])
        return g[:, t, :, None, None].exp() * (erase @ state) + beta[:, t, :, None, None] * outer(k[:, t], v[:, t])

    assert_same(delta_rule(q, k, v, g, beta, impl=impl), loop(q, update))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_kimi_delta_attention(impl):
    """S_t = (I - beta k k^T) Diag(alpha) S_{t-1} + beta k v^T (arXiv 2510.26692)."""
    q, k, v, beta = qkv()
    g = -draw(B, T, H, K, seed=5).abs()

    def update(t, state):
        erase = torch.eye(K, dtype=torch.float64) - beta[:, t, :, None, None] * outer(k[:, t], k[:, t])
        return erase @ (g[:, t].exp()[..., None] * state) + beta[:, t, :, None, None] * outer(k[:, t], v[:, t])

    assert_same(delta_rule(q, k, v, g, beta, impl=impl), loop(q, update))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_delta_product_is_stride(impl):
    """Two Householder micro-steps a token, read after the second (arXiv 2502.10297)."""
    q, k, v, beta = qkv(micro_steps=2)

    def update(t, state):
        for i in (2 * t, 2 * t + 1):
            erase = torch.eye(K, dtype=torch.float64) - beta[:, i, :, None, None] * outer(k[:, i], k[:, i])
            state = erase @ state + beta[:, i, :, None, None] * outer(k[:, i], v[:, i])
        return state

    assert_same(delta_rule(q, k, v, beta=beta, stride=2, impl=impl), loop(q, update))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_free_erase_key(impl):
    """S_t = (I - k e^T) Diag(alpha) S_{t-1} + k z^T with an erase key that is not a multiple of k."""
    q, k, v, beta = qkv()
    e, g = beta[..., None] * normalize(k + 0.3 * draw(B, T, H, K, seed=6), dim=-1), -draw(B, T, H, K, seed=5).abs()

    def update(t, state):
        erase = torch.eye(K, dtype=torch.float64) - outer(k[:, t], e[:, t])
        return erase @ (g[:, t].exp()[..., None] * state) + outer(k[:, t], v[:, t])

    assert_same(delta_rule(q, k, v, g, e=e, impl=impl), loop(q, update))


def test_without_beta_it_is_one():
    q, k, v, beta = qkv()
    assert_same(delta_rule(q, k, v), delta_rule(q, k, v, beta=torch.ones_like(beta)))


def test_beta_and_erase_key_exclude_each_other():
    q, k, v, beta = qkv()
    with pytest.raises(ValueError, match=r"beta .* or e"):
        delta_rule(q, k, v, beta=beta, e=k)


def test_a_step_leaves_the_given_state_alone():
    q, k, v, beta = (x[:, 0] for x in qkv())
    state = draw(B, H, K, V)
    before = state.clone()
    delta_rule_step(q, k, v, beta=beta, state=state)
    assert torch.equal(state, before)


@pytest.mark.parametrize("cosine", [0.0, 0.9, 1.0])
def test_the_inverse_survives_correlated_keys_at_beta_2(cosine):
    """At cosine 1 powers of T grow past 1e19 before they vanish, while no entry of the inverse exceeds 2."""
    common, own = normalize(draw(1, 1, 64, seed=1), dim=-1), normalize(draw(8, CHUNK, 64, seed=2), dim=-1)
    keys = normalize(cosine**0.5 * common + (1 - cosine) ** 0.5 * own, dim=-1).float()
    T_matrix = 2 * (keys @ keys.mT).tril(-1)
    exact = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + T_matrix.double())
    assert exact.abs().max() < 4
    assert (inverse(T_matrix) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("channels", [(), (K,)])
def test_a_decay_of_minus_infinity_forgets_without_nan(channels):
    q, k, v, beta = qkv()
    g = torch.full((B, T, H, *channels), -torch.inf, dtype=torch.float64).requires_grad_()
    o, _ = delta_rule(q, k, v, g, beta)
    o.sum().backward()
    alone = (k * q).sum(-1, keepdim=True) * beta[..., None] * v * K**-0.5  # what a token reads of its own write
    torch.testing.assert_close(o, alone)
    assert not g.grad.isnan().any()


def test_what_triton_does_not_take_is_refused_by_name_and_left_to_chunked():
    pytest.importorskip("triton")
    wide = {name: torch.randn(1, 4, 1, 16, dtype=torch.float64) for name in ("q", "k", "v")}
    long = {name: torch.randn(1, 4, 1, 264) for name in ("q", "k", "v")}
    refused = {"K = 264": long, "float64": wide, "float16": {name: x.half() for name, x in wide.items()}}
    for what, inputs in refused.items():
        with pytest.raises(ValueError, match=what):
            delta_rule(**inputs, impl="triton")
        assert_same(delta_rule(**inputs), delta_rule(**inputs, impl="chunked"))


def test_half_precision_rounds_operands_and_keeps_the_state_in_fp32():
    q, k, v, beta = (x.bfloat16() for x in qkv())
    o, state = delta_rule(q, k, v, beta=beta)
    exact_o, exact_state = delta_rule(*(x.double() for x in (q, k, v)), beta=beta.double())
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    for found, exact in ((o, exact_o), (state, exact_state)):
        assert 1e-4 < (found - exact).norm() / exact.norm() < 2e-2
