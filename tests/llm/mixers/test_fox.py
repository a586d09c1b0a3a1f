"""Forgetting attention: softmax attention times the product of forget gates (Lin et al. 2025, arXiv 2503.02130)."""

from __future__ import annotations

import torch

from mixer_kernels import Segments


def test_equals_the_published_attention(make_mixer):
    mixer, x, T = make_mixer("fox qk_norm=false"), torch.randn(40, 64, dtype=torch.float64), 40
    heads = lambda y: y.view(T, mixer.num_heads, -1).transpose(0, 1)  # noqa: E731  [H, T, K]
    q, k, v = heads(mixer.q_proj(x)), heads(mixer.k_proj(x)), heads(mixer.v_proj(x))
    f = torch.sigmoid(mixer.f_proj(x)).T  # [H, T]
    F = torch.zeros(mixer.num_heads, T, T, dtype=torch.float64)
    for t in range(T):
        for s in range(t + 1):
            F[:, t, s] = f[:, s + 1 : t + 1].prod(-1)
    weights = F * (q @ k.mT * mixer.head_dim**-0.5).exp()
    o = (weights / weights.sum(-1, keepdim=True)) @ v
    wanted = mixer.o_proj(o.transpose(0, 1).flatten(1))
    torch.testing.assert_close(mixer(x[None], Segments.whole_rows(1, T)).y[0], wanted)


def test_sixteen_bits_do_not_spoil_a_bias_of_hundreds(make_mixer):
    mixer = make_mixer("fox", torch.float32)
    with torch.no_grad():
        mixer.f_proj.bias.fill_(-5.0)  # a document's log forget gates sum up to -1000
    x, segments = torch.randn(1, 200, 64), Segments.whole_rows(1, 200)
    wide = mixer(x, segments).y
    with torch.autocast("cpu", torch.bfloat16):
        narrow = mixer(x, segments).y
    assert (narrow.float() - wide).norm() < 0.02 * wide.norm()
