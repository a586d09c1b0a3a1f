"""One token in Triton, for decoding: the state is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixer_kernels.common.launch import configuration, launch, operator_name, plain


@triton.jit(do_not_specialize=["scale"])
def update(
    q, k, v, g, state, o, new, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One head and a block of values a program; g [B, HV, DECAY], where DECAY is 0 without decay, 1 or K."""
    line = tl.program_id(0).to(tl.int64)
    query = line // HV * H + line % HV // (HV // H)
    keys, values = tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    tile = line * K * V + keys[:, None] * V + values[None, :]
    S = tl.load(state + tile)
    if DECAY == 1:
        S *= tl.exp(tl.load(g + line))
    if DECAY > 1:
        S *= tl.exp(tl.load(g + line * K + keys))[:, None]
    b_k, b_v = tl.load(k + query * K + keys).to(tl.float32), tl.load(v + line * V + values).to(tl.float32)
    S += b_k[:, None] * b_v[None, :]
    b_q = tl.load(q + query * K + keys).to(tl.float32) * scale
    tl.store(o + line * V + values, tl.sum(b_q[:, None] * S, axis=0).to(o.dtype.element_ty))
    tl.store(new + tile, S)


def step_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [B, H, K], v [B, HV, V], g fp32 [B, HV, K or 1], state fp32 [B, HV, K, V] -> o in v's dtype, new state."""
    return (step if plain(q, k, v, g, state) else step_op)(q, k, v, g, state, scale)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The launch for `step_triton`."""
    (batch, heads, key_dim), (_, value_heads, value_dim) = q.shape, v.shape
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    decay = 0 if g is None else g.shape[-1]
    g = q if g is None else g.contiguous()
    o, new = torch.empty_like(v), torch.empty_like(state)
    settings = configuration("linear_attention", "step", v, key_dim, value_dim)
    launch(
        update, (batch * value_heads, value_dim // settings["BV"]), q, k, v, g, state, o, new, scale,
        H=heads, HV=value_heads, K=key_dim, V=value_dim, DECAY=decay, **settings,
    )  # fmt: skip
    return o, new


step_op = torch.library.custom_op(operator_name("linear_attention_step"), step, mutates_args=())


@step_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)
