"""Gated DeltaNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.decay import init_A_log, init_dt_bias, log_decay
from llm.mixers.recurrent import DeltaMixer
from llm.model.norm import l2_normalize
from llm.model.precision import widen


class GatedDeltaNet(DeltaMixer):
    """``S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T`` (Yang et al. 2024, arXiv 2412.06464).

    One decay g and one learning rate beta = sigmoid(x W_b) a head; q and k are convolved, SiLU, and of unit length; the
    output is RMS-normalised and multiplied by SiLU of a gate. With `negative_eigenvalues` beta reaches 2, so that a
    transition can reflect (arXiv 2411.12537). A ~ U(0, 16), softplus(dt_bias) log-uniform in [1e-3, 1e-1].
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        expand_v: float = 2.0,
        negative_eigenvalues: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, expand_v=expand_v, **common)
        self.beta_max = 2.0 if negative_eigenvalues else 1.0
        self.a_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.b_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {
            "q": l2_normalize(q),
            "k": l2_normalize(k),
            "v": v,
            "g": log_decay(self.a_proj(x), self.A_log, self.dt_bias),
            "beta": self.beta_max * torch.sigmoid(widen(self.b_proj(x))),
        }

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        init_A_log(self.A_log, 0.0, 16.0)
        init_dt_bias(self.dt_bias)
