"""DeltaNet, token by token as in Yang et al. 2024 (arXiv 2406.06484), section 2.2."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("negative", ["false", "true"])
def test_equals_the_published_recurrence(observe, unit, outer, read, negative):
    seen = observe(f"deltanet negative_eigenvalues={negative}")
    q, k, v = unit(seen.q), unit(seen.k), seen.v
    beta = (1 + (negative == "true")) * torch.sigmoid(seen.mixer.b_proj(seen.x))
    S = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        v_old = read(S, k[t])
        v_new = beta[t, :, None] * v[t] + (1 - beta[t, :, None]) * v_old
        S = S - outer(k[t], v_old) + outer(k[t], v_new)
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5)
