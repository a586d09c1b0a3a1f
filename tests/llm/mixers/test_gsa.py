"""Gated slot attention: memories of keys and values with a gate for each slot (Zhang et al. 2024, arXiv 2409.07146)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def test_equals_the_published_recurrence(observe, outer):
    seen = observe("gsa")
    mixer, q, k, v = seen.mixer, F.silu(seen.q), F.silu(seen.k), F.silu(seen.v)
    f = torch.sigmoid(mixer.f_proj(seen.x)).view(70, mixer.num_heads, -1) ** (1 / 8)
    H, M = f.shape[1:]
    keys = torch.zeros(H, M, k.shape[2], dtype=torch.float64)
    values = torch.zeros(H, M, v.shape[2], dtype=torch.float64)
    for t in range(70):
        keys = f[t][:, :, None] * keys + outer(1 - f[t], k[t])
        values = f[t][:, :, None] * values + outer(1 - f[t], v[t])
        share = (keys @ q[t][:, :, None])[..., 0].softmax(-1)
        torch.testing.assert_close(seen.o[t], F.silu((values * share[:, :, None]).sum(1)))
