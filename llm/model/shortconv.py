"""Short causal depthwise convolution."""

from __future__ import annotations

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
        batch, tokens, _ = x_BTD.shape
        history = self.init_state(batch, x_BTD.device, x_BTD.dtype) if state is None else state.to(x_BTD.dtype)
        extended = torch.cat([history, x_BTD], dim=1)  # [B, size - 1 + T, D]
        # how many tokens back a token may look; a continued document looks into the state as far as it likes
        index = torch.arange(tokens, device=x_BTD.device)
        reach = torch.where(segments.row_start < 0, self.size, index - segments.row_start)[..., None]  # [B, T, 1]
        weight = self.weight[:, 0].to(x_BTD.dtype)
        y = weight[:, self.size - 1] * x_BTD
        for back in range(1, self.size):
            start = self.size - 1 - back
            past = extended[:, start : start + tokens]
            y = y + weight[:, start] * torch.where(reach >= back, past, 0.0)
        return self.activation(y), self._last_inputs(extended, reach[:, -1])

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
