"""Gated DeltaNet-2: a gate for each key channel in the erase and for each value channel in the write."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("negative", ["false", "true"])
def test_equals_the_published_recurrence(observe, unit, outer, read, standard_decay, negative):
    seen = observe(f"gdn2 negative_eigenvalues={negative}")
    mixer, q, k, v = seen.mixer, unit(seen.q), unit(seen.k), seen.v
    g = standard_decay(mixer.f_proj(seen.x).view(k.shape), mixer.A_log[:, None], mixer.dt_bias.view(k.shape[1:]))
    b = (1 + (negative == "true")) * torch.sigmoid(mixer.b_proj(seen.x)).view(k.shape)
    w = torch.sigmoid(mixer.w_proj(seen.x)).view(v.shape)
    S = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        S = g[t].exp()[:, :, None] * S
        S = S - outer(k[t], read(S, b[t] * k[t])) + outer(k[t], w[t] * v[t])
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)
