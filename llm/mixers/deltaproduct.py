"""Gated DeltaProduct."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.decay import init_A_log, init_dt_bias, log_decay
from llm.mixers.recurrent import DeltaMixer
from llm.model.norm import l2_normalize
from llm.model.precision import widen


class GatedDeltaProduct(DeltaMixer):
    """``S_t = prod_j (I - beta_tj k_tj k_tj^T) exp(g_t) S_{t-1} + ...``, n steps of the delta rule for each token.

    Siems et al. 2025, arXiv 2502.10297. Each of the `householder` steps has keys, values and a beta of its own, beta =
    2 sigmoid(x W_b) (`negative_eigenvalues` false: sigmoid), so that products of n reflections can permute n + 1
    things. `forget_gate`: Gated DeltaNet's decay, before the first step. The output is RMS-normalised and multiplied by
    SiLU of a gate.

    Reduction: n micro-steps a token, read after the last.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        householder: int = 2,
        negative_eigenvalues: bool = True,
        forget_gate: bool = True,
        **common: Any,
    ) -> None:
        if householder < 1:
            raise ValueError(f"householder={householder}: must be at least 1")
        self.householder = householder
        self.state_products = 2 * householder + 1  # n times erase and write, read
        super().__init__(d_model, layer_idx, n_layers, **common)
        self.beta_max = 2.0 if negative_eigenvalues else 1.0
        self.b_proj = nn.Linear(d_model, householder * self.num_heads, bias=False)
        self.a_proj = nn.Linear(d_model, self.num_heads, bias=False) if forget_gate else None
        if forget_gate:
            self.A_log = nn.Parameter(torch.empty(self.num_heads))
            self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    def projected(self) -> dict[str, int]:
        return {"q": self.key_dim, "k": self.householder * self.key_dim, "v": self.householder * self.value_dim}

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        found = {
            "q": l2_normalize(q),
            "k": self._by_step(l2_normalize(k), -2),  # [.., n, H, K]
            "v": self._by_step(v, -2),
            "beta": self._by_step(self.beta_max * torch.sigmoid(widen(self.b_proj(x))), -1),  # [.., n, H]
        }
        if self.a_proj is not None:
            g = log_decay(self.a_proj(x), self.A_log, self.dt_bias)
            found["g"] = torch.stack([g] + [torch.zeros_like(g)] * (self.householder - 1), dim=-2)
        return found

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        if self.a_proj is not None:
            init_A_log(self.A_log, 0.0, 16.0)
            init_dt_bias(self.dt_bias)

    def _by_step(self, x: Tensor, axis: int) -> Tensor:
        """An axis of n H -> [n, H]."""
        return x.unflatten(axis, (self.householder, -1))
