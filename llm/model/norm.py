"""Normalisations that mixers share. Block norms are torch's own `nn.RMSNorm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.model.precision import widen

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}


class GatedRMSNorm(nn.Module):
    """``RMSNorm(x) * activation(gate)`` over the last dimension, computed in at least fp32.

    x and gate [..., dim]; returns the gate's dtype. The output normalisation of GLA, Gated DeltaNet (SiLU) and Kimi
    Delta Attention (sigmoid). Raises ValueError for an activation other than silu or sigmoid.
    """

    def __init__(self, dim: int, *, eps: float, activation: str) -> None:
        super().__init__()
        if activation not in GATES:
            raise ValueError(f"gate activation {activation!r}: choose one of {', '.join(GATES)}")
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.activation = eps, activation

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(widen(x), self.weight.shape, widen(self.weight), self.eps)
        return (normed * GATES[self.activation](widen(gate))).to(gate.dtype)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, computed in at least fp32, returned in x's dtype.

    Delta rules need unit keys exactly enough that 1 - beta |k|^2 stays within [-1, 1].
    """
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
