"""GateLoop with complex numbers, token by token (Katsch 2023, arXiv 2311.01927)."""

from __future__ import annotations

import torch


def test_equals_the_published_recurrence(observe):
    seen = observe("gateloop")
    mixer, (T, H, K) = seen.mixer, seen.q.shape
    q, k = (torch.complex(*x.chunk(2, dim=-1)) for x in (seen.q, seen.k))
    magnitude = torch.sigmoid(mixer.a_proj(seen.x)).view(T, H, K // 2)
    a = torch.polar(magnitude, mixer.theta_proj(seen.x).view(T, H, K // 2))
    S = torch.zeros(H, K // 2, seen.v.shape[2], dtype=torch.complex128)
    for t in range(T):
        S = a[t][:, :, None] * S + k[t].conj()[:, :, None] * seen.v[t][:, None, :]
        torch.testing.assert_close(seen.o[t], (S * q[t][:, :, None]).sum(1).real * K**-0.5)
