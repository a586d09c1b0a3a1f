"""The Triton kernels of the short convolution's gradients. What comes before SiLU is computed again, not stored."""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.short_convolution.forward import taps


@triton.jit(do_not_specialize=["T"])
def weight_gradient(
    x_ptr, w_ptr, start_ptr, dy_ptr, du_ptr, dw_ptr, T,
    D: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """du [B, T, D], the gradient before SiLU, and dw [tiles, S, D] in fp32, each tile's share."""
    row = tl.program_id(2).to(tl.int64)
    rows, channel = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BD + tl.arange(0, BD)
    in_row, inside = channel < D, rows < T
    x_ptr, start_ptr = x_ptr + row * T * D, start_ptr + row * T
    at = rows[:, None] * D + channel[None, :]
    mask = inside[:, None] & in_row[None, :]
    du = tl.load(dy_ptr + row * T * D + at, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        u = taps(x_ptr, w_ptr, start_ptr, rows, channel, in_row, T, D, S)
        gate = tl.sigmoid(u)
        du = du * gate * (1 + u * (1 - gate))
        tl.store(du_ptr + row * T * D + at, du.to(du_ptr.dtype.element_ty), mask=mask)
    begin = tl.load(start_ptr + rows, mask=inside, other=0)
    tile = row * tl.num_programs(1) + tl.program_id(1)
    for back in tl.static_range(S):
        seen = inside & (rows >= back) & (rows - begin >= back)
        past = tl.load(x_ptr + at - back * D, mask=seen[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        tl.store(dw_ptr + (tile * S + (S - 1 - back)) * D + channel, tl.sum(du * past, axis=0), mask=in_row)


@triton.jit(do_not_specialize=["T"])
def input_gradient(
    w_ptr, start_ptr, du_ptr, dx_ptr, T,
    D: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx [B, T, D]: of each token, what the tokens that see it want of it."""
    row = tl.program_id(2).to(tl.int64)
    rows, channel = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BD + tl.arange(0, BD)
    in_row = channel < D
    du_ptr, start_ptr = du_ptr + row * T * D, start_ptr + row * T
    dx = tl.zeros([BT, BD], tl.float32)
    for ahead in tl.static_range(S):
        later = rows + ahead
        inside = later < T
        seeing = inside & (later - tl.load(start_ptr + later, mask=inside, other=0) >= ahead)
        weight = tl.load(w_ptr + channel * S + (S - 1 - ahead), mask=in_row, other=0.0).to(tl.float32)
        at = later[:, None] * D + channel[None, :]
        du = tl.load(du_ptr + at, mask=seeing[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        dx += du * weight[None, :]
    out = dx_ptr + row * T * D + rows[:, None] * D + channel[None, :]
    tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=(rows < T)[:, None] & in_row[None, :])
