"""Linear attention with its normaliser (Katharopoulos et al. 2020), which the output norm takes away."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mixer_kernels import Segments


def test_equals_the_published_recurrence_behind_the_norm(observe, outer, read):
    seen = observe("linear_attention")
    q, k, v = F.elu(seen.q) + 1, F.elu(seen.k) + 1, seen.v
    mixer, outputs = seen.mixer, []
    S, z = torch.zeros(*k.shape[1:], v.shape[2], dtype=torch.float64), torch.zeros(k.shape[1:], dtype=torch.float64)
    for t in range(70):
        S, z = S + outer(k[t], v[t]), z + k[t]
        outputs.append(read(S, q[t]) / (z * q[t]).sum(-1, keepdim=True))
    gate = mixer.by_head(mixer.g_proj(seen.x), mixer.head_v_dim)
    mixer.o_norm.eps = 0.0
    wanted = mixer.o_proj(mixer.o_norm(torch.stack(outputs), gate).flatten(-2))
    torch.testing.assert_close(mixer(seen.x[None], Segments.whole_rows(1, 70)).y[0], wanted)
