"""Gated linear attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llm.mixers.recurrent import RecurrentMixer, low_rank
from llm.model.precision import widen
from mixer_kernels.linear_attention import linear_attention, linear_attention_step


class GatedLinearAttention(RecurrentMixer):
    """``S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(K)`` (Yang et al. 2023, arXiv 2312.06635).

    The log-decay of each key channel is ``logsigmoid(low-rank(x)) / gate_normalizer``; the output is RMS-normalised and
    multiplied by SiLU of a gate. Settings besides the common ones: `gate_rank`, `gate_normalizer`.
    """

    operator = linear_attention
    operator_step = linear_attention_step
    state_products = 2  # write, read

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        head_k_dim: int = 128,
        expand_v: float = 2.0,
        num_heads: int | None = None,
        conv_size: int | None = None,
        gate_rank: int = 16,
        gate_normalizer: float = 16.0,
        norm_eps: float = 1e-6,
        impl: str = "auto",
        **common: Any,
    ) -> None:
        super().__init__(
            d_model, layer_idx, n_layers,
            head_k_dim=head_k_dim, expand_v=expand_v, num_heads=num_heads, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation="silu", impl=impl, **common,
        )  # fmt: skip
        self.gate_normalizer = gate_normalizer
        self.gk_proj = low_rank(d_model, gate_rank, self.key_dim, bias=True)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        logits = self.gk_proj(x).unflatten(-1, (self.num_heads, self.head_k_dim))
        return {"q": q, "k": k, "v": v, "g": F.logsigmoid(widen(logits)) / self.gate_normalizer}
