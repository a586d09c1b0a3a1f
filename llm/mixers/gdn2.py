"""Gated DeltaNet-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.kda import KimiDeltaAttention
from llm.model.norm import GatedRMSNorm, l2_normalize
from llm.model.precision import widen


class GatedDeltaNet2(KimiDeltaAttention):
    """``S_t = (I - k_t (b_t * k_t)^T) Diag(exp g_t) S_{t-1} + k_t (w_t * v_t)^T`` (Gated DeltaNet-2, NVIDIA 2026).

    Kimi Delta Attention with a gate of its own for each key channel in the erase, b = sigmoid(x W_b), and for each
    value channel in the write, w = sigmoid(x W_w), both of full rank and without bias. `negative_eigenvalues` doubles
    b alone. The low-rank output gate is SiLU, as in the paper (its port in flash-linear-attention has a sigmoid).

    Reduction: free erase keys e = b * k, values w * v.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        self.o_norm = GatedRMSNorm(self.head_v_dim, eps=self.o_norm.eps, activation="silu")
        self.b_proj = nn.Linear(d_model, self.key_dim, bias=False)
        self.w_proj = nn.Linear(d_model, self.value_dim, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        b = self.beta_max * torch.sigmoid(widen(self.by_head(self.b_proj(x), self.head_k_dim)))
        w = torch.sigmoid(widen(self.by_head(self.w_proj(x), self.head_v_dim)))
        k = l2_normalize(k)
        return {
            "q": l2_normalize(q),
            "k": k,
            "v": (w * widen(v)).to(v.dtype),
            "g": self._log_decay(x),
            "e": (b * widen(k)).to(k.dtype),
        }
