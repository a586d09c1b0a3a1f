"""Heads of two kinds in one layer: all outputs normalised head by head, then one projection (arXiv 2606.20097)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llm.model.attention import attend
from mixer_kernels import Segments


def test_is_one_projection_of_all_heads(make_mixer):
    mixer, x = make_mixer("hydrahead full.rope_theta=null"), torch.randn(1, 40, 64, dtype=torch.float64)
    segments, full, linear = Segments.whole_rows(1, 40), mixer.full, mixer.linear
    heads = lambda y: y.unflatten(-1, (full.num_heads, -1))  # noqa: E731
    q, k = full.q_norm(heads(full.q_proj(x))), full.k_norm(heads(full.k_proj(x)))
    o = F.rms_norm(attend(q, k, heads(full.v_proj(x)), segments.visible()), q.shape[3:], full.o_norm.weight, 1e-6)
    found = []
    linear.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    got = mixer(x, segments).y
    weight = torch.cat([full.o_proj.weight, linear.o_proj.weight], dim=1)
    torch.testing.assert_close(got, torch.cat([o.flatten(2), found[0]], dim=-1) @ weight.T)
