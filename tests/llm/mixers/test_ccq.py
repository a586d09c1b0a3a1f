"""Curvature-conditioned queries: a read turned by the covariance of the keys (Le et al. 2026, arXiv 2606.01294)."""

from __future__ import annotations

import torch


def test_equals_the_recurrence(observe, unit, outer, read, standard_decay):
    seen = observe("ccq")
    mixer, x, q, k, v = seen.mixer, seen.x, unit(seen.q), unit(seen.k), seen.v
    alpha = standard_decay(mixer.a_proj(x), mixer.A_log, mixer.dt_bias).exp()
    beta = torch.sigmoid(mixer.b_proj(x))
    strength = torch.sigmoid((q * mixer.lambda_weight).sum(-1) + mixer.lambda_bias)
    H, K = q.shape[1:]
    S, C = torch.zeros(H, K, v.shape[2], dtype=torch.float64), torch.zeros(H, K, K, dtype=torch.float64)
    mass = torch.zeros(H, dtype=torch.float64)
    for t in range(70):
        decay = alpha[t, :, None, None]
        C, mass = decay * C + outer(k[t], k[t]), alpha[t] * mass + 1
        S = decay * S
        S = S + outer(k[t], beta[t, :, None] * (v[t] - read(S, k[t])))
        contraction = torch.eye(K) - strength[t, :, None, None] * C / mass[:, None, None]
        assert torch.linalg.eigvalsh(contraction).min() >= 0
        torch.testing.assert_close(seen.o[t], read(S, read(contraction, q[t])) * K**-0.5)
