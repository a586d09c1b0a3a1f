"""Short causal depthwise convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixer_kernels import short_convolution
from mixer_kernels.segments import Segments


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last `size` tokens of a document, followed by SiLU unless `silu` is false.

    The state is the last ``size - 1`` inputs of the document, [B, size - 1, D], zeros where there were fewer. Weight
    [D, 1, size] as in `nn.Conv1d`; tap ``size - 1`` meets the newest token.
    """

    def __init__(self, dim: int, size: int, *, silu: bool = True) -> None:
        super().__init__()
        self.silu = silu
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
        weight = self.weight[:, 0]
        y = short_convolution(x_BTD, weight, segments=segments, history=state, silu=self.silu)
        history = self.init_state(x_BTD.shape[0], x_BTD.device, x_BTD.dtype) if state is None else state.to(x_BTD.dtype)
        # how many tokens back the last one may look; a continued document looks into the state as far as it likes
        last = segments.row_start[:, -1:]
        reach_B1 = torch.where(last < 0, self.size, x_BTD.shape[1] - 1 - last)
        return y, self._last_inputs(torch.cat([history, x_BTD[:, 1 - self.size :]], dim=1), reach_B1)

    def step(self, x_BD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token: x [B, D] -> y [B, D] and the new state."""
        window = torch.cat([state.to(x_BD.dtype), x_BD[:, None]], dim=1)  # [B, size, D]
        y = (window * self.weight[:, 0].T.to(x_BD.dtype)).sum(dim=1)
        return F.silu(y) if self.silu else y, window[:, 1:]

    def _last_inputs(self, extended: Tensor, reach_B1: Tensor) -> Tensor:
        """The newest size - 1 inputs, zero where they belong to an earlier document than the last token."""
        back = torch.arange(self.size - 2, -1, -1, device=extended.device)
        newest = extended[:, extended.shape[1] - (self.size - 1) :]
        return torch.where((back <= reach_B1)[..., None], newest, 0.0)
