"""One layer of the stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.model.mlp import SwiGLU
from mixer_kernels.segments import Segments


class Block(nn.Module):
    """Pre-norm residual block: ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``. [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, mixer: TokenMixer, mlp_width: int, norm_eps: float) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = SwiGLU(d_model, mlp_width)

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        mixed = self.mixer(self.mixer_norm(x_BTD), segments, state, return_state=return_state)
        x_BTD = x_BTD + mixed.y
        return MixerOutput(x_BTD + self.mlp(self.mlp_norm(x_BTD)), mixed.state, mixed.aux)

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        """One token: x [B, D] -> [B, D] and the mixer's new state."""
        y, state = self.mixer.step(self.mixer_norm(x_BD), state)
        x_BD = x_BD + y
        return x_BD + self.mlp(self.mlp_norm(x_BD)), state

    def reset_parameters(self, std: float) -> None:
        """Norms at one, matrices from N(0, std), the mixer as it sees fit."""
        self.mixer_norm.reset_parameters()
        self.mlp_norm.reset_parameters()
        self.mixer.reset_parameters(std)
        for matrix in self.mlp.parameters():
            torch.nn.init.normal_(matrix, std=std)
