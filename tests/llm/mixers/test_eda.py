"""Erase-then-delta attention: two projections of the state, one write (Li et al. 2026, arXiv 2606.26560)."""

from __future__ import annotations

import torch


def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay):
    seen = observe("eda")
    mixer, q, k, v = seen.mixer, unit(seen.q), unit(seen.k), seen.v
    g = standard_decay(mixer.f_proj(seen.x).view(k.shape), mixer.A_log[:, None], mixer.dt_bias.view(k.shape[1:]))
    e = unit(mixer.e_proj(seen.x).view(k.shape))
    beta, gamma = torch.sigmoid(mixer.b_proj(seen.x)), torch.sigmoid(mixer.c_proj(seen.x))
    S = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        S = g[t].exp()[:, :, None] * S
        S = S - gamma[t, :, None, None] * outer(e[t], read(S, e[t]))
        S = S + beta[t, :, None, None] * outer(k[t], v[t] - read(S, k[t]))
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)
