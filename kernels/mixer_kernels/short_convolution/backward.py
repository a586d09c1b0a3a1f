"""The Triton kernel of the short convolution's gradients. What comes before SiLU is computed again, not stored."""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.short_convolution.forward import taps


@triton.jit(do_not_specialize=["T"])
def gradients(
    x_ptr, w_ptr, start_ptr, dy_ptr, dx_ptr, dw_ptr, T,
    D: tl.constexpr, S: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx [B, T, D], and dw [tiles, S, D] in fp32: each tile's share, to be summed in a fixed order."""
    row = tl.program_id(2).to(tl.int64)
    rows, channel = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BD + tl.arange(0, BD)
    in_row = channel < D
    x_ptr, dy_ptr, start_ptr = x_ptr + row * T * D, dy_ptr + row * T * D, start_ptr + row * T
    tile = row * tl.num_programs(1) + tl.program_id(1)
    dx = tl.zeros([BT, BD], tl.float32)
    for ahead in tl.static_range(S):
        # the gradient before SiLU of the tokens that see these ones as the `ahead`-th before them
        later = rows + ahead
        inside = later < T
        at = later[:, None] * D + channel[None, :]
        du = tl.load(dy_ptr + at, mask=inside[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        if SILU:
            u = taps(x_ptr, w_ptr, start_ptr, later, channel, in_row, T, D, S)
            gate = tl.sigmoid(u)
            du = du * gate * (1 + u * (1 - gate))
        begin = tl.load(start_ptr + later, mask=inside, other=0)
        seeing = inside & (later - begin >= ahead)
        weight = tl.load(w_ptr + channel * S + (S - 1 - ahead), mask=in_row, other=0.0).to(tl.float32)
        dx += tl.where(seeing[:, None], du, 0.0) * weight[None, :]
        if ahead == 0:
            for back in tl.static_range(S):
                seen = inside & (rows >= back) & (rows - begin >= back)
                past = tl.load(x_ptr + at - back * D, mask=seen[:, None] & in_row[None, :], other=0.0).to(tl.float32)
                share = tl.sum(tl.where(seen[:, None], du, 0.0) * past, axis=0)
                tl.store(dw_ptr + (tile * S + (S - 1 - back)) * D + channel, share, mask=in_row)
    out = dx_ptr + row * T * D + rows[:, None] * D + channel[None, :]
    tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=(rows < T)[:, None] & in_row[None, :])
