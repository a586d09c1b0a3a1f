"""HGRN2."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.recurrent import AdditiveMixer
from llm.model.precision import widen


class HGRN2(AdditiveMixer):
    """``S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_t^T,  o_t = S_t^T q_t / sqrt(K)`` (Qin et al. 2024, arXiv 2404.07904).

    A gated linear recurrence with an expanded state: what a key channel does not keep is what it takes in. f = gamma +
    (1 - gamma) sigmoid(x W_k): `k_proj` computes the forget gate's logits. q is SiLU, the output is RMS-normalised as
    a whole; no output gate.

    Inferred: the paper ties the lower bounds gamma of all layers through a cumulative softmax, which begins at gamma =
    l / L; here each layer learns its own, sigmoid(lower_bound), from there (0.001 in the first).
    """

    normalize_heads = False

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, gate_activation=None, **common)
        self.initial_bound = max(layer_idx / n_layers, 1e-3)
        self.lower_bound = nn.Parameter(torch.empty(self.key_dim))

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        gamma = torch.sigmoid(widen(self.by_head(self.lower_bound, self.head_k_dim)))  # [H, K]
        taken = (1 - gamma) * torch.sigmoid(-widen(k))  # 1 - f, without a difference of nearly equal numbers
        return {"q": F.silu(q), "k": taken.to(k.dtype), "v": v, "g": torch.log1p(-taken)}

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        nn.init.constant_(self.lower_bound, math.log(self.initial_bound / (1 - self.initial_bound)))
