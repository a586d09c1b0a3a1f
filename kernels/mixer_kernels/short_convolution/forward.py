"""The Triton kernel of the short convolution: a tile of BT tokens and BD channels a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def taps(x_ptr, w_ptr, start_ptr, rows, channel, in_row, T, D: tl.constexpr, S: tl.constexpr):
    """The convolution at tokens `rows` of a row and at channels `channel`, fp32 [BT, BD]."""
    inside = (rows >= 0) & (rows < T)
    begin = tl.load(start_ptr + rows, mask=inside, other=0)
    total = tl.zeros([rows.shape[0], channel.shape[0]], tl.float32)
    for back in tl.static_range(S):
        seen = inside & (rows >= back) & (rows - begin >= back)
        weight = tl.load(w_ptr + channel * S + (S - 1 - back), mask=in_row, other=0.0).to(tl.float32)
        at = (rows - back)[:, None] * D + channel[None, :]
        past = tl.load(x_ptr + at, mask=seen[:, None] & in_row[None, :], other=0.0)
        total += weight[None, :] * past.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["T"])
def convolve(
    x_ptr, w_ptr, start_ptr, y_ptr, T,
    D: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [B, T, D] of x [B, T, D], w [D, S], row_start [B, T]."""
    row = tl.program_id(2).to(tl.int64)
    rows, channel = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BD + tl.arange(0, BD)
    in_row = channel < D
    u = taps(x_ptr + row * T * D, w_ptr, start_ptr + row * T, rows, channel, in_row, T, D, S)
    if SILU:
        u = u * tl.sigmoid(u)
    out = y_ptr + row * T * D + rows[:, None] * D + channel[None, :]
    tl.store(out, u.to(y_ptr.dtype.element_ty), mask=(rows < T)[:, None] & in_row[None, :])
