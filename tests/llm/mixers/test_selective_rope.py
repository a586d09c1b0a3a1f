"""Selective RoPE with complex numbers: products of rotations in softmax attention, complex decays in linear ones."""

from __future__ import annotations

import torch

from mixer_kernels import Segments


def steps(rotation, x):
    """tau * phi [T, H, K/2], the convolution written out."""
    unit = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    projected = rotation.up(rotation.down(unit))
    padded = torch.cat([torch.zeros(3, projected.shape[1], dtype=x.dtype), projected])
    phi = sum(rotation.conv1d.weight[:, 0, i] * padded[i : i + len(x)] for i in range(4))
    tau = 500_000.0 ** (-torch.arange(rotation.pairs, dtype=x.dtype) / rotation.pairs)
    return phi.view(len(x), rotation.heads, rotation.pairs) * tau


def as_complex(y):
    return torch.complex(*y.chunk(2, dim=-1))


def test_softmax_attention_over_products_of_rotations(make_mixer):
    mixer, T = make_mixer("selective_rope qk_norm=false"), 30
    x = torch.randn(T, 64, dtype=torch.float64)
    heads = lambda y: y.view(T, mixer.num_heads, -1)  # noqa: E731
    q, k, v = as_complex(heads(mixer.q_proj(x))), as_complex(heads(mixer.k_proj(x))), heads(mixer.v_proj(x))
    turn = torch.polar(torch.ones(1, dtype=torch.float64), steps(mixer.rotation, x))
    outputs = []
    for t in range(T):
        between = torch.stack([turn[s + 1 : t + 1].prod(0) for s in range(t + 1)])  # [S, H, K/2]
        logits = (q[t] * between * k[: t + 1].conj()).sum(-1).real * mixer.head_dim**-0.5
        outputs.append((logits.softmax(0)[..., None] * v[: t + 1]).sum(0))
    wanted = mixer.o_proj(torch.stack(outputs).flatten(1))
    torch.testing.assert_close(mixer(x[None], Segments.whole_rows(1, T)).y[0], wanted)


def test_linear_attention_with_complex_decays(make_mixer, observe):
    seen = observe("gla_selective_rope")
    mixer, x = seen.mixer, seen.x
    q, k = (as_complex(mixer.by_head(p(x), mixer.head_k_dim)) for p in (mixer.q_proj, mixer.k_proj))
    alpha = torch.sigmoid(mixer.gk_proj(x)).view(70, mixer.num_heads, -1) ** (1 / 16)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), steps(mixer.rotation, x))
    # magnitudes of a pair's two channels differ, so real and imaginary parts are kept apart: rotate the state
    real, imaginary = (torch.zeros(*q.shape[1:], seen.v.shape[2], dtype=torch.float64) for _ in range(2))
    angle = turn.new_ones(q.shape[1:])
    for t in range(70):
        angle = angle * turn[t]
        written, asked = k[t] * angle, q[t] * angle
        keep_real, keep_imaginary = alpha[t].chunk(2, dim=-1)
        real = keep_real[..., None] * real + written.real[..., None] * seen.v[t][:, None]
        imaginary = keep_imaginary[..., None] * imaginary + written.imag[..., None] * seen.v[t][:, None]
        o = (asked.real[..., None] * real + asked.imag[..., None] * imaginary).sum(1) * 16**-0.5
        torch.testing.assert_close(seen.o[t], o)
