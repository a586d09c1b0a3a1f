"""Mamba-2 as a state space model, token by token (Dao & Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mixer_kernels import Segments


def test_equals_the_published_layer(observe, outer, read):
    seen = observe("mamba2")
    mixer, x, C, B, v = seen.mixer, seen.x, seen.q[:, 0], seen.k[:, 0], seen.v
    delta = F.softplus(mixer.dt_proj(x) + mixer.dt_bias)
    A = -mixer.A_log.exp()
    h, ys = torch.zeros(v.shape[1], B.shape[1], v.shape[2], dtype=torch.float64), []
    for t in range(70):
        h = (delta[t] * A).exp()[:, None, None] * h + outer(delta[t, :, None] * B[t], v[t])
        ys.append(read(h, C[t].expand(v.shape[1], -1)) + mixer.D[:, None] * v[t])
    y = torch.stack(ys).flatten(1) * F.silu(mixer.g_proj(x))
    wanted = mixer.o_proj(F.rms_norm(y, y.shape[-1:], mixer.o_norm.weight, mixer.o_norm.eps))
    torch.testing.assert_close(mixer(x[None], Segments.whole_rows(1, 70)).y[0], wanted)
