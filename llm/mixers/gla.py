"""Gated linear attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llm.mixers.recurrent import AdditiveMixer, low_rank
from llm.model.precision import widen


class GatedLinearAttention(AdditiveMixer):
    """``S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(K)`` (Yang et al. 2023, arXiv 2312.06635).

    The log-decay of each key channel is ``logsigmoid(low-rank(x)) / gate_normalizer``; the output is RMS-normalised and
    multiplied by SiLU of a gate. Settings besides the common ones: `gate_rank`, `gate_normalizer`.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        expand_v: float = 2.0,
        conv_size: int | None = None,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        **common: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, expand_v=expand_v, conv_size=conv_size, **common)
        self.gate_normalizer = gate_normalizer
        self.gk_proj = low_rank(d_model, gate_rank, self.num_heads * self.head_k_dim, bias=True)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        logits = self.gk_proj(x).unflatten(-1, (self.num_heads, self.head_k_dim))
        return {"q": q, "k": k, "v": v, "g": F.logsigmoid(widen(logits)) / self.gate_normalizer}
