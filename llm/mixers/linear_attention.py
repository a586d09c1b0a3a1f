"""Linear attention without gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm.mixers.recurrent import AdditiveMixer


class LinearAttention(AdditiveMixer):
    """``S_t = S_{t-1} + phi(k_t) v_t^T,  o_t = S_t^T phi(q_t)``, phi(x) = elu(x) + 1 (Katharopoulos et al. 2020).

    The paper divides o_t by phi(q_t) . sum of phi(k_s), a positive number for each token and head. The RMS norm of each
    head's output takes any such factor away, so there is no division (as Qin et al. 2022, arXiv 2210.10340, have it).
    The output is multiplied by SiLU of a gate. Nothing is ever forgotten: the plain additive memory to compare with.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, expand_v: float = 2.0, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, expand_v=expand_v, **common)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"q": _feature(q), "k": _feature(k), "v": v}


def _feature(x: Tensor) -> Tensor:
    """elu(x) + 1, in the dtype of x (autocast would widen exp)."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp().to(x.dtype))
