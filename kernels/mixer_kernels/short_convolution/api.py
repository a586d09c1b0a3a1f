"""The public short convolution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mixer_kernels.common.arguments import expect, resolve_segments
from mixer_kernels.dispatch import choose
from mixer_kernels.segments import Segments
from mixer_kernels.short_convolution.reference import Convolve

TRITON_CHANNELS = 16  # a multiple of it


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    segments: Segments | None = None,
    history: Tensor | None = None,
    silu: bool = True,
    impl: str = "auto",
) -> Tensor:
    """y_t = sum over j < S of w_(S - 1 - j) x_(t - j), within each document, then SiLU if `silu`.

    x [B, T, D] of any floating dtype; weight [D, S], in x's dtype or fp32; history [B, S - 1, D] are the inputs before
    the row, which continued documents look back into (None: zeros). Returns y [B, T, D] in x's dtype.

    Triton takes rows without history, D a multiple of 16, bf16 and fp32; ``auto`` leaves the rest to plain torch.
    Raises ValueError for shapes that do not fit, and for an `impl` that cannot run here.
    """
    batch, tokens, channels = x.shape
    taps = weight.shape[-1]
    expect("weight", weight, (channels, taps), "[D, S]")
    row_start = resolve_segments(segments, batch, tokens, history is not None, x.device)
    lacks = {
        "a history": history is not None,
        f"{x.dtype}": x.dtype not in (torch.bfloat16, torch.float32),
        f"D = {channels} (only multiples of {TRITON_CHANNELS})": channels % TRITON_CHANNELS > 0,
    }
    if choose(impl, x, "short_convolution", ", ".join(what for what, missing in lacks.items() if missing)) == "triton":
        from mixer_kernels.short_convolution.autograd import forward_op

        return forward_op(x, weight, row_start, silu)
    if history is None:
        history = x.new_zeros(batch, taps - 1, channels)
    expect("history", history, (batch, taps - 1, channels), "[B, S - 1, D]")
    # how many tokens back a token may look; a continued document looks into the history as far as it likes
    index = torch.arange(tokens, device=x.device)
    reach = torch.where(row_start < 0, taps, index - row_start)[..., None]
    y = Convolve.apply(x, history.to(x.dtype), weight.T.to(x.dtype), reach)
    return F.silu(y) if silu else y
