"""HGRN2: the input gate is what the forget gate leaves (Qin et al. 2024, arXiv 2404.07904)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def test_equals_the_published_recurrence(observe, outer, read):
    seen = observe("hgrn2")
    gamma = torch.sigmoid(seen.mixer.lower_bound).view(seen.k.shape[1:])
    torch.testing.assert_close(gamma, torch.full_like(gamma, 1 / 4), rtol=1e-6, atol=0)  # layer 1 of 4
    f = gamma + (1 - gamma) * torch.sigmoid(seen.k)
    S = torch.zeros(*f.shape[1:], seen.v.shape[2], dtype=torch.float64)
    for t in range(70):
        S = f[t][:, :, None] * S + outer(1 - f[t], seen.v[t])
        torch.testing.assert_close(seen.o[t], read(S, F.silu(seen.q[t])) * 16**-0.5)
