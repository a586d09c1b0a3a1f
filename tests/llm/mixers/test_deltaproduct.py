"""Gated DeltaProduct: n generalised Householder steps a token (Siems et al. 2025, arXiv 2502.10297)."""

from __future__ import annotations

import pytest
import torch

from mixer_kernels import Segments


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay, n):
    seen = observe(f"deltaproduct householder={n}")
    mixer, q = seen.mixer, unit(seen.q)
    H, T = mixer.num_heads, 70
    k, v = unit(seen.k).view(T, n, H, -1), seen.v.view(T, n, H, -1)
    beta = 2 * torch.sigmoid(mixer.b_proj(seen.x)).view(T, n, H, 1)
    g = standard_decay(mixer.a_proj(seen.x), mixer.A_log, mixer.dt_bias)
    S = torch.zeros(H, k.shape[3], v.shape[3], dtype=torch.float64)
    for t in range(T):
        S = S * g[t].exp()[:, None, None]
        for j in range(n):
            S = S + outer(k[t, j], beta[t, j] * (v[t, j] - read(S, k[t, j])))
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)


@pytest.mark.parametrize("settings", ["householder=1", "householder=3", "forget_gate=false"])
def test_steps_one_by_one(make_mixer, settings):
    mixer, x = make_mixer(f"deltaproduct {settings}"), torch.randn(2, 9, 64, dtype=torch.float64)
    y, state = mixer(x, Segments.whole_rows(2, 9)).y, mixer.init_state(2, 9, "cpu", torch.float64)
    for t in range(9):
        y_t, state = mixer.step(x[:, t], state)
        torch.testing.assert_close(y_t, y[:, t])
