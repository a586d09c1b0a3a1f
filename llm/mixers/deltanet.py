"""DeltaNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.recurrent import DeltaMixer
from llm.model.norm import l2_normalize
from llm.model.precision import widen


class DeltaNet(DeltaMixer):
    """``S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`` (Yang et al. 2024, arXiv 2406.06484).

    beta = sigmoid(x W_b), one a head; with `negative_eigenvalues` it reaches 2, so that a transition can reflect (arXiv
    2411.12537). q, k and v are convolved and SiLU, q and k of unit length; the output is RMS-normalised, without a
    gate.
    """

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, negative_eigenvalues: bool = False, **common: Any
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, gate_activation=None, **common)
        self.beta_max = 2.0 if negative_eigenvalues else 1.0
        self.b_proj = nn.Linear(d_model, self.num_heads, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        beta = self.beta_max * torch.sigmoid(widen(self.b_proj(x)))
        return {"q": l2_normalize(q), "k": l2_normalize(k), "v": v, "beta": beta}
