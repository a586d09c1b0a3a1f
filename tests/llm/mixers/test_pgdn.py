"""Preconditioned Gated DeltaNet: write keys scaled by the curvature of their channels (arXiv 2604.21100)."""

from __future__ import annotations

import torch


def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay):
    seen = observe("pgdn")
    mixer, x, q, k, v = seen.mixer, seen.x, unit(seen.q), unit(seen.k), seen.v
    alpha = standard_decay(mixer.a_proj(x), mixer.A_log, mixer.dt_bias).exp()
    fading = standard_decay(mixer.curvature_a_proj(x), mixer.curvature_A_log, mixer.curvature_dt_bias).exp()
    beta, rate = torch.sigmoid(mixer.b_proj(x)), torch.sigmoid(mixer.curvature_b_proj(x))
    S, A = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64), torch.zeros(k.shape[1:], dtype=torch.float64)
    for t in range(70):
        A = fading[t, :, None] * A + rate[t, :, None] * k[t] ** 2
        r = (A + 1e-6).log() - mixer.center[:, None]
        scaled = k[t] * 1.5 ** (-r / (1 + r.abs()))
        S = alpha[t, :, None, None] * S
        S = S + outer(scaled, beta[t, :, None] * (v[t] - read(S, k[t])))
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)
