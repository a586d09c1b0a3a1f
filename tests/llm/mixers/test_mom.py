"""Mixture of memories: only those that a token is sent to decay and change (Du et al. 2025, arXiv 2502.13685)."""

from __future__ import annotations

import pytest
import torch

from mixer_kernels import Segments


def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay):
    seen = observe("mom")
    mixer, x, q, k, v = seen.mixer, seen.x, unit(seen.q), unit(seen.k), seen.v
    alpha = standard_decay(mixer.a_proj(x), mixer.A_log, mixer.dt_bias).exp()
    beta, share = torch.sigmoid(mixer.b_proj(x)), mixer.router(x).softmax(-1)
    S = torch.zeros(4, *k.shape[1:], v.shape[2], dtype=torch.float64)
    for t in range(70):
        largest, chosen = share[t].topk(2)
        o = 0
        for p, m in zip(largest / largest.sum(), chosen.tolist(), strict=True):
            S[m] = alpha[t, :, None, None] * S[m]
            S[m] = S[m] + outer(k[t], beta[t, :, None] * (v[t] - read(S[m], k[t])))
            o = o + p * read(S[m], q[t]) * k.shape[2] ** -0.5
        torch.testing.assert_close(seen.o[t], o)


@pytest.mark.parametrize("top", [1, 2, 4])
def test_sorting_by_memory_equals_memories_as_heads(make_mixer, top):
    mixer, x = make_mixer(f"mom top={top}"), torch.randn(2, 90, 64, dtype=torch.float64)
    is_start = torch.zeros(2, 90, dtype=torch.bool)
    is_start[:, [0, 1, 40]] = True
    segments = Segments.from_starts(is_start)
    torch.testing.assert_close(mixer(x, segments).y, mixer(x, segments, return_state=True).y)


def test_the_auxiliary_loss_is_least_where_all_memories_are_used_alike(make_mixer):
    mixer, x, segments = make_mixer("mom"), torch.randn(1, 400, 64, dtype=torch.float64), Segments.whole_rows(1, 400)
    with torch.no_grad():
        mixer.router.weight.normal_(std=0.01)
        even = mixer(x, segments).aux["balance_loss"]
        mixer.router.weight[0] = 3 * x.mean((0, 1))  # most tokens go to the first
        x = x + 2 * x.mean((0, 1))
        crowded = mixer(x, segments).aux["balance_loss"]
    assert even == pytest.approx(0.01, rel=0.05)
    assert crowded > 1.02 * even
