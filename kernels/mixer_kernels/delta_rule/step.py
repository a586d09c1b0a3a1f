"""One token in Triton, for decoding: the state is read once and written once, whatever the number of micro-steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixer_kernels.common.launch import configuration, operator_name


@triton.jit(do_not_specialize=["scale"])
def update(
    q, k, v, g, beta, e, state, o, new, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
    DECAY: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    """One head and a block of values a program; g [B, STRIDE, HV, DECAY], where DECAY is 0 without decay, 1 or K."""
    line = tl.program_id(0).to(tl.int64)
    batch, head = line // HV, line % HV
    keys, values = tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    tile = line * K * V + keys[:, None] * V + values[None, :]
    S = tl.load(state + tile)
    for i in range(STRIDE):
        at = (batch * STRIDE + i) * HV + head
        if DECAY == 1:
            S *= tl.exp(tl.load(g + at))
        if DECAY > 1:
            S *= tl.exp(tl.load(g + at * K + keys))[:, None]
        b_k = tl.load(k + ((batch * STRIDE + i) * H + head // (HV // H)) * K + keys).to(tl.float32)
        b_z = tl.load(v + at * V + values).to(tl.float32)
        if TIED:
            strength = tl.load(beta + at)
            b_z, b_e = b_z * strength, b_k * strength
        else:
            b_e = tl.load(e + at * K + keys).to(tl.float32)
        residual = b_z - tl.sum(b_e[:, None] * S, axis=0)
        S += b_k[:, None] * residual[None, :]
    b_q = tl.load(q + (batch * H + head // (HV // H)) * K + keys).to(tl.float32) * scale
    tl.store(o + line * V + values, tl.sum(b_q[:, None] * S, axis=0).to(o.dtype.element_ty))
    tl.store(new + tile, S)


@torch.library.custom_op(operator_name("delta_rule_step"), mutates_args=())
def step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q [B, H, K]; k [B, n, H, K], v [B, n, HV, V], fp32 g [B, n, HV, K or 1], either fp32 beta [B, n, HV] or
    e [B, n, HV, K], for n micro-steps; state fp32 [B, HV, K, V] -> o [B, HV, V] in v's dtype, new state."""
    (batch, heads, key_dim), (_, stride, value_heads, value_dim) = q.shape, v.shape
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    decay = 0 if g is None else g.shape[-1]
    g, beta_or_k, e_or_k = (k if x is None else x.contiguous() for x in (g, beta, e))  # k: a placeholder
    o, new = v.new_empty(batch, value_heads, value_dim), torch.empty_like(state)
    settings = configuration("delta_rule", "step", v, key_dim, value_dim)
    update[(batch * value_heads, value_dim // settings["BV"])](
        q, k, v, g, beta_or_k, e_or_k, state, o, new, scale,
        H=heads, HV=value_heads, K=key_dim, V=value_dim, STRIDE=stride, DECAY=decay, TIED=e is None, **settings,
    )  # fmt: skip
    return o, new


@step_triton.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape[0], *v.shape[2:]), state.new_empty(state.shape)
