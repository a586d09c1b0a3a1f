"""Erase-then-delta attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.kda import KimiDeltaAttention
from llm.mixers.recurrent import low_rank
from llm.model.norm import l2_normalize
from llm.model.precision import widen


class EraseThenDelta(KimiDeltaAttention):
    """``S_t = (I - beta_t k_t k_t^T) (I - gamma_t e_t e_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T``.

    Li et al. 2026, arXiv 2606.26560. Kimi Delta Attention that first clears an address e of its own: e is a projection
    of rank `erase_rank`, of unit length, and gamma = sigmoid(x W_c), one a head.

    Reduction: two micro-steps a token, (key e, erase key gamma e, value 0, decay g) and (key k, erase key beta k, value
    beta v, no decay), read after the second; the first is the tied rule with beta = gamma and value 0.

    Inferred: the heads share the first factor of the projection of e; all that is not of e and gamma is as in Kimi
    Delta Attention.
    """

    state_products = 5  # twice erase and write, read

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, erase_rank: int = 16, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        self.e_proj = low_rank(d_model, erase_rank, self.key_dim)
        self.c_proj = nn.Linear(d_model, self.num_heads, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        written = super().operands(x, q, k, v)
        erased = l2_normalize(self.by_head(self.e_proj(x), self.head_k_dim))
        gamma = torch.sigmoid(widen(self.c_proj(x)))
        return {
            "q": written["q"],
            "k": torch.stack([erased, written["k"]], dim=-3),  # [.., 2, H, K]
            "v": torch.stack([torch.zeros_like(v), v], dim=-3),
            "g": torch.stack([written["g"], torch.zeros_like(written["g"])], dim=-3),
            "beta": torch.stack([gamma, written["beta"]], dim=-2),  # [.., 2, H]
        }
