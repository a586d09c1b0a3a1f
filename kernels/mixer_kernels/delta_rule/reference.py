"""The delta rule token by token: what the other implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    *,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - k_t e_t^T) Diag(exp g_t) S_{t-1} + k_t z_t^T,  o_t = scale * S_t^T q_t, in the state's dtype.

    Shapes as in `delta_rule`; `row_start` int [B, T] and `initial_state` [B, HV, K, V] are given. With `stride` n a
    token is n micro-steps and is read after the last. The decay comes first, then the erase and the write.
    """
    dtype, out_dtype = initial_state.dtype, v.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q, k = (to_value_heads(x, v.shape[2]) for x in (q, k))
    e, z = erase_and_value(k, v, beta, e)
    state, outputs = initial_state, []
    for t in range(q.shape[1]):
        state = torch.where((row_start[:, t] == t)[:, None, None, None], 0.0, state)
        for i in range(t * stride, (t + 1) * stride):
            if g is not None:
                state = state * g[:, i, :, :, None].exp()
            residual = z[:, i, :, None] - e[:, i, :, None] @ state  # [B, HV, 1, V]
            state = state + k[:, i, :, :, None] @ residual
        outputs.append((scale * q[:, t, :, None]) @ state)
    return torch.cat(outputs, 2).transpose(1, 2).to(out_dtype), state


def to_value_heads(x: Tensor, value_heads: int) -> Tensor:
    """[B, T, H, K] -> [B, T, HV, K]: value head i reads head i // (HV / H)."""
    return x.repeat_interleave(value_heads // x.shape[2], dim=2) if value_heads != x.shape[2] else x


def erase_and_value(k: Tensor, v: Tensor, beta: Tensor | None, e: Tensor | None) -> tuple[Tensor, Tensor]:
    """Erase keys [B, T, HV, K] and written values [B, T, HV, V] of the tied (`beta`, or 1) or the free (`e`) form."""
    if e is not None:
        return e.to(k.dtype), v
    return (k, v) if beta is None else (beta[..., None] * k, beta[..., None] * v)
