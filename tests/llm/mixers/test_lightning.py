"""The linear attention of TransNormerLLM with its fixed decays (Qin et al. 2023, arXiv 2307.14995)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def test_equals_the_published_recurrence(observe, outer, read):
    seen = observe("lightning")  # layer 1 of 4
    q, k, v, H = F.silu(seen.q), F.silu(seen.k), seen.v, seen.v.shape[1]
    decay = torch.tensor([math.exp(-8 * h / H * (1 - 1 / 4)) for h in range(1, H + 1)], dtype=torch.float64)
    S = torch.zeros(H, k.shape[2], v.shape[2], dtype=torch.float64)
    for t in range(70):
        S = decay[:, None, None] * S + outer(k[t], v[t])
        torch.testing.assert_close(seen.o[t], read(S, q[t]) * 16**-0.5, rtol=1e-6, atol=1e-6)  # decays come from fp32
