"""Kaczmarz linear attention: the step eta / (|k|^2 + eps) along raw keys."""

from __future__ import annotations

import torch


def test_equals_the_published_recurrence(observe, outer, read, standard_decay):
    seen = observe("kla")
    mixer, q, k, v = seen.mixer, seen.q, seen.k, seen.v
    g = standard_decay(mixer.a_proj(seen.x), mixer.A_log, mixer.dt_bias)
    beta = torch.sigmoid(mixer.b_proj(seen.x)) / (k.square().sum(-1) + 1e-6)
    S = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        S = S * g[t].exp()[:, None, None]
        S = S + outer(k[t], beta[t, :, None] * (v[t] - read(S, k[t])))
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)


def test_a_full_step_answers_a_key_of_any_length_with_its_value(observe, outer, read):
    seen = observe("kla")
    q = torch.randn(1, 1, seen.mixer.num_heads, 16, dtype=torch.float64)
    k, v = q * torch.logspace(-1, 2, seen.mixer.num_heads)[:, None], torch.randn_like(seen.v[None, :1])
    found = seen.mixer.operands(seen.x[None, :1], k, k, v)
    S = outer(found["k"][0, 0], found["v"][0, 0])  # eta = 1, from an empty state
    torch.testing.assert_close(read(S, k[0, 0]), v[0, 0], rtol=1e-4, atol=1e-4)
