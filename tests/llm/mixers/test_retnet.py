"""Retention, in the parallel form of Sun et al. 2023 (arXiv 2307.08621), section 2.1, with complex numbers."""

from __future__ import annotations

import torch


def test_equals_the_published_parallel_form(observe):
    seen = observe("retnet")
    T, H, K = seen.q.shape
    theta = 10000.0 ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
    n = torch.arange(T)
    phase = torch.polar(torch.ones(1, dtype=torch.float64), n[:, None] * theta)[:, None]  # exp(i n theta)
    q, k = (torch.complex(*x.chunk(2, dim=-1)) * phase for x in (seen.q, seen.k))
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    D = torch.where(n[:, None] >= n, gamma[:, None, None] ** (n[:, None] - n).clamp(min=0), 0.0)
    scores = torch.einsum("nhk,mhk->hnm", q, k.conj()).real * K**-0.5
    torch.testing.assert_close(seen.o, torch.einsum("hnm,mhv->nhv", scores * D, seen.v))
