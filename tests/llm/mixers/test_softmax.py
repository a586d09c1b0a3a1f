"""Softmax attention written out token by token: all tokens, a window, an output gate."""

from __future__ import annotations

import pytest
import torch

from mixer_kernels import Segments


@pytest.mark.parametrize(
    ("described", "window", "gated"),
    [("softmax", 99, False), ("swa window=7", 7, False), ("gated_softmax", 99, True)],
)
def test_equals_the_sum_over_what_is_seen(make_mixer, described, window, gated):
    mixer, T = make_mixer(described), 30
    x = torch.randn(T, 64, dtype=torch.float64)
    pairs = mixer.head_dim // 2
    theta = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    heads = lambda y: y.view(T, mixer.num_heads, -1)  # noqa: E731
    q, k = mixer.q_norm(heads(mixer.q_proj(x))), mixer.k_norm(heads(mixer.k_proj(x)))
    v, outputs = heads(mixer.v_proj(x)), []
    q, k = (torch.complex(*y.chunk(2, dim=-1)) for y in (q, k))
    for t in range(T):
        s = torch.arange(max(0, t - window + 1), t + 1)
        turn = torch.polar(torch.ones(1, dtype=torch.float64), (t - s)[:, None] * theta)[:, None]
        logits = (q[t] * turn * k[s].conj()).sum(-1).real * mixer.head_dim**-0.5  # [S, H]
        outputs.append((logits.softmax(0)[..., None] * v[s]).sum(0))
    o = torch.stack(outputs).flatten(1)
    wanted = mixer.o_proj(o * torch.sigmoid(mixer.g_proj(x)) if gated else o)
    torch.testing.assert_close(mixer(x[None], Segments.whole_rows(1, T)).y[0], wanted)
