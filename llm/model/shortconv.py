"""Short causal depthwise convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixer_kernels.segments import Segments


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last `size` tokens of a document, followed by SiLU unless `silu` is false.

    The state is the last ``size - 1`` inputs of the document, [B, size - 1, D], zeros where there were fewer. Weight
    [D, 1, size] as in `nn.Conv1d`; tap ``size - 1`` meets the newest token.
    """

    def __init__(self, dim: int, size: int, *, silu: bool = True) -> None:
        super().__init__()
        self.activation = F.silu if silu else torch.nn.Identity()
        self.weight = nn.Parameter(torch.empty(dim, 1, size))
        self.size = size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-1/sqrt(size), 1/sqrt(size)), torch's own for convolutions and that of Mamba's."""
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Zeros [B, size - 1, D]."""
        return torch.zeros(batch, self.size - 1, self.weight.shape[0], device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor, segments: Segments, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> y [B, T, D] and the state after the last token."""
        history = self.init_state(x_BTD.shape[0], x_BTD.device, x_BTD.dtype) if state is None else state.to(x_BTD.dtype)
        # how many tokens back a token may look; a continued document looks into the state as far as it likes
        index = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        reach_BT = torch.where(segments.row_start < 0, self.size, index - segments.row_start)
        y = _Convolve.apply(x_BTD, history, self.weight[:, 0].T.to(x_BTD.dtype), reach_BT[..., None])
        return self.activation(y), self._last_inputs(torch.cat([history, x_BTD], dim=1), reach_BT[:, -1:])

    def step(self, x_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token: x [B, D] -> y [B, D] and the new state."""
        window = torch.cat([state.to(x_BD.dtype), x_BD[:, None]], dim=1)  # [B, size, D]
        y = (window * self.weight[:, 0].T.to(x_BD.dtype)).sum(dim=1)
        return self.activation(y), window[:, 1:]

    def _last_inputs(self, extended: Tensor, reach_B1: Tensor) -> Tensor:
        """The newest size - 1 inputs, zero where they belong to an earlier document than the last token."""
        back = torch.arange(self.size - 2, -1, -1, device=extended.device)
        newest = extended[:, extended.shape[1] - (self.size - 1) :]
        return torch.where((back <= reach_B1)[..., None], newest, 0.0)


class _Convolve(torch.autograd.Function):
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
