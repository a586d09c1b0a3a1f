"""Softmax linear attention: scalars that compete across heads, on keys and on queries (arXiv 2602.01744)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mixer_kernels import Segments


def test_scales_keys_and_outputs(observe, outer, read):
    seen = observe("sla")
    mixer, x, q, k, v = seen.mixer, seen.x, seen.q, seen.k, seen.v
    H = v.shape[1]
    alpha = torch.sigmoid(mixer.gk_proj(x)).view(k.shape) ** (1 / 16)
    write, read_share = (H * p(x).softmax(-1)[..., None] for p in (mixer.write_proj, mixer.read_proj))
    S, outputs = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64), []
    for t in range(70):
        S = alpha[t][:, :, None] * S + outer(write[t] * k[t], v[t])
        outputs.append(read(S, q[t]) * 16**-0.5)
    normed = F.rms_norm(torch.stack(outputs), v.shape[2:], mixer.o_norm.weight, mixer.o_norm.eps)
    gated = read_share * normed * F.silu(mixer.g_proj(x)).view(v.shape)
    torch.testing.assert_close(mixer(x[None], Segments.whole_rows(1, 70)).y[0], mixer.o_proj(gated.flatten(1)))


def test_even_competition_is_gated_linear_attention(make_mixer):
    mixer, plain, x = make_mixer("sla"), make_mixer("gla"), torch.randn(1, 20, 64, dtype=torch.float64)
    plain.load_state_dict({n: p for n, p in mixer.state_dict().items() if n in plain.state_dict()})
    with torch.no_grad():
        mixer.read_proj.weight.zero_()
        mixer.write_proj.weight.zero_()
    segments = Segments.whole_rows(1, 20)
    torch.testing.assert_close(mixer(x, segments).y, plain(x, segments).y)
