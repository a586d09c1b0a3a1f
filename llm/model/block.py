"""One layer of the stack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.model.mlp import SwiGLU
from llm.model.recompute import FULL, NONE, SELECTIVE, recomputed
from mixer_kernels.segments import Segments


class Block(nn.Module):
    """Pre-norm residual block: ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``. [B, T, D] -> [B, T, D].

    `checkpointing` says what is computed again in backward rather than kept: "none"; "selective", the MLP and what is
    cheap in the mixer; "full", everything but the block's input.
    """

    def __init__(
        self, d_model: int, mixer: TokenMixer, mlp_width: int, norm_eps: float, checkpointing: str = NONE
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.mixer_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.mlp = SwiGLU(d_model, mlp_width)

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        def mix(x_BTD: Tensor) -> MixerOutput:
            return self.mixer(self.mixer_norm(x_BTD), segments, state, return_state=return_state)

        checkpointing = self.checkpointing if torch.is_grad_enabled() else NONE
        if checkpointing == FULL:
            return recomputed(lambda x_BTD: self._residual(x_BTD, mix(x_BTD), self._feed_forward), x_BTD)
        if checkpointing == SELECTIVE:
            mixed = recomputed(mix, x_BTD, keep_products=True)
            return self._residual(x_BTD, mixed, lambda x_BTD: recomputed(self._feed_forward, x_BTD))
        return self._residual(x_BTD, mix(x_BTD), self._feed_forward)

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(x_BTD))

    def _residual(self, x_BTD: Tensor, mixed: MixerOutput, feed_forward: Callable[[Tensor], Tensor]) -> MixerOutput:
        x_BTD = x_BTD + mixed.y
        return MixerOutput(x_BTD + feed_forward(x_BTD), mixed.state, mixed.aux)

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
