"""The short convolution in plain torch: what CPUs run, and rows that continue a document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Convolve(torch.autograd.Function):
    """y_t = sum over back of w_(S - 1 - back) x_(t - back), as far back as `reach` allows; S taps.

    x [B, T, D], history [B, S - 1, D] before it, weight [S, D], reach int [B, T, 1]. Backward is written out: derived
    from slices and masks, it would go over memory a dozen times, in eager mode and compiled.
    """

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, history: Tensor, weight_SD: Tensor, reach: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, history, weight_SD, reach)
        taps = len(weight_SD)
        y = weight_SD[-1] * x_BTD
        for back in range(1, taps):
            y = y + weight_SD[taps - 1 - back] * torch.where(reach >= back, _shifted(x_BTD, history, back), 0.0)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_BTD, history, weight_SD, reach = ctx.saved_tensors
        taps = len(weight_SD)
        wide = torch.promote_types(dy.dtype, torch.float32)
        extended, dweight = 0, []  # the gradient of history and x end to end, [B, S - 1 + T, D]
        for back in range(taps):
            reaching = dy if back == 0 else torch.where(reach >= back, dy, 0.0)
            extended = extended + F.pad(weight_SD[taps - 1 - back] * reaching, (0, 0, taps - 1 - back, back))
            past = x_BTD if back == 0 else _shifted(x_BTD, history, back)
            dweight.append((reaching.to(wide) * past.to(wide)).sum((0, 1)))
        dweight = torch.stack(dweight[::-1]).to(weight_SD.dtype)
        return extended[:, taps - 1 :], extended[:, : taps - 1], dweight, None


def _shifted(x_BTD: Tensor, history: Tensor, back: int) -> Tensor:
    """The tokens `back` places earlier, [B, T, D]."""
    before = history[:, history.shape[1] - back :]
    return torch.cat([before, x_BTD], dim=1)[:, : x_BTD.shape[1]]
