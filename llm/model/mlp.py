"""The feed-forward sublayer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases (Shazeer 2020, arXiv 2002.05202). [..., D] -> [..., D]."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, width, bias=False)
        self.up_proj = nn.Linear(d_model, width, bias=False)
        self.down_proj = nn.Linear(width, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def flops(self, tokens: int) -> int:
        """Matrix-multiply FLOPs of a forward pass over `tokens` tokens."""
        return 2 * tokens * 3 * self.gate_proj.weight.numel()
