"""RWKV-7, the whole layer token by token as in Peng et al. 2025 (arXiv 2503.14456), section 4."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mixer_kernels import Segments


def test_equals_the_published_layer(make_mixer, outer, read):
    mixer, x = make_mixer("rwkv7"), torch.randn(70, 64, dtype=torch.float64)
    with torch.no_grad():
        for name in ("r", "w", "k", "v", "a", "g"):  # the layer's shares at initialisation are all alike
            getattr(mixer, f"x_{name}").uniform_(0, 1)
        got = mixer(x[None], Segments.whole_rows(1, 70)).y[0]
    H, K = mixer.num_heads, mixer.head_k_dim
    before = torch.cat([torch.zeros(1, 64, dtype=torch.float64), x[:-1]])
    shifted = {n: torch.lerp(x, before, getattr(mixer, f"x_{n}")) for n in ("r", "w", "k", "v", "a", "g")}
    r, k, v = (p(shifted[n]).view(70, H, K) for p, n in ((mixer.q_proj, "r"), (mixer.k_proj, "k"), (mixer.v_proj, "v")))
    w = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=torch.float64)) * torch.sigmoid(mixer.w_lora(shifted["w"])))
    a = torch.sigmoid(mixer.a_lora(shifted["a"])).view(70, H, K)
    kappa = F.normalize(k * mixer.k_k.view(H, K), dim=-1)
    written = k * torch.lerp(torch.ones_like(a), a, mixer.k_a.view(H, K))
    S, w = torch.zeros(H, K, K, dtype=torch.float64), w.view(70, H, K)
    for t in range(70):
        S = w[t][:, :, None] * S - outer(a[t] * kappa[t], read(S, kappa[t])) + outer(written[t], v[t])
        p = F.group_norm(read(S, r[t]).view(1, -1), H, mixer.o_norm.weight, mixer.o_norm.bias, eps=K * 1e-5)[0]
        u = (r[t] * mixer.r_k * written[t]).sum(-1, keepdim=True) * v[t]
        y = mixer.o_proj((p + u.flatten()) * mixer.g_proj(shifted["g"][t]))
        torch.testing.assert_close(got[t], y, rtol=1e-4, atol=1e-5)  # l2_normalize has another epsilon
