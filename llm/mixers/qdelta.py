"""Q-Delta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.gdn import GatedDeltaNet
from llm.model.precision import widen

INITIAL_LOGIT = -0.9


class QDelta(GatedDeltaNet):
    """``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T (k_t + lambda_t q_t))^T``.

    Park et al. 2026, arXiv 2606.08804. Gated DeltaNet that corrects what the query would find, too: lambda =
    sigmoid(x W_l - 0.9), one a head. As q and k have unit length and beta is at most 1, eigenvalues stay in [-1, 1]:
    1 - beta (1 + lambda q.k). They would not for beta up to 2, so there is no such setting.

    Reduction: free erase keys e = beta (k + lambda q), values beta v.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, negative_eigenvalues=False, **common)
        self.lambda_proj = nn.Linear(d_model, self.num_heads, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        found = super().operands(x, q, k, v)
        share = torch.sigmoid(widen(self.lambda_proj(x)) + INITIAL_LOGIT)
        beta = found.pop("beta")[..., None]
        e = beta * (widen(found["k"]) + share[..., None] * widen(found["q"]))
        return found | {"e": e.to(k.dtype), "v": (beta * widen(v)).to(v.dtype)}
