"""The recurrence token by token, in plain torch and any dtype: what every other implementation is held to.

    S_t = Diag(exp g_t) S_{t-1} Diag(exp gv_t) + k_t v_t^T,    o_t = scale * S_t^T q_t

Gated linear attention (Yang et al. 2024, arXiv 2312.06635); scalar g is RetNet's and Mamba-2's recurrence, no g is
plain linear attention; gv is the first pass of gated slot attention (Zhang et al. 2024, arXiv 2409.07146).
"""

from __future__ import annotations

import torch
from torch import Tensor


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, state: Tensor, scale: float, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """One token: q, k [B, HV, K], v [B, HV, V], g [B, HV, K or 1], gv [B, HV, V], state [B, HV, K, V] -> o, state."""
    if g is not None:
        state = state * g.exp()[..., :, None]
    if gv is not None:
        state = state * gv.exp()[..., None, :]
    # Products, not broadcasting, so that torch's FLOP counter sees 2KV for the write and 2KV for the read.
    written = state + k[..., :, None] @ v[..., None, :]
    o = scale * (q[..., None, :] @ (state if exclusive else written)).squeeze(-2)
    return o, written


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """All tokens: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K or 1], gv [B, T, HV, V] -> o, final state."""
    dtype, groups = initial_state.dtype, v.shape[2] // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(groups, dim=2).unbind(1) for x in (q, k))
    g, gv = (None if x is None else x.unbind(1) for x in (g, gv))
    state, out = initial_state, []
    for t, v_t in enumerate(v.to(dtype).unbind(1)):
        continues = (row_start[:, t] < t)[:, None, None, None]
        state = torch.where(continues, state, 0.0)
        g_t, gv_t = (None if x is None else x[t] for x in (g, gv))
        o_t, state = step(q[t], k[t], v_t, g_t, gv_t, state, scale, exclusive)
        out.append(o_t)
    return torch.stack(out, dim=1).to(v.dtype), state
