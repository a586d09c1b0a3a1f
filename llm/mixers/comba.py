"""Comba."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.decay import init_A_log, init_dt_bias, log_decay
from llm.mixers.recurrent import DeltaMixer
from llm.model.norm import l2_normalize
from llm.model.precision import widen


class Comba(DeltaMixer):
    """``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T`` (Hu et al. 2025, arXiv 2506.02475).

    Feedback control of a bilinear system: the state is corrected with p = sigmoid(d) k, a weaker key, before it decays,
    and the query with q - D p; d and D are learned, one a head. beta = sigmoid(x W_b), decay as in Gated DeltaNet,
    q and k convolved, SiLU and of unit length, sigmoid output gate. `correction` is D's initial value (the paper's 1;
    its code suggests 0.02 for small models).

    Reduction: the erase comes before the decay, so the free erase key is e = beta exp(-g) p, with values beta v; g is
    kept above -50 so that exp(-g) does not overflow. Inferred: the query is corrected before it is normalised, and p is
    made of the normalised key (the port in flash-linear-attention normalises p itself, which undoes sigmoid(d)).
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, correction: float = 1.0, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, gate_activation="sigmoid", **common)
        self.correction = correction
        self.a_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.b_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.feedback = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        g = log_decay(self.a_proj(x), self.A_log, self.dt_bias).clamp(min=-50.0)
        beta = torch.sigmoid(widen(self.b_proj(x)))[..., None]
        feedback = torch.sigmoid(widen(self.feedback))[:, None]  # [H, 1]
        corrected = widen(q) - widen(self.D)[:, None] * feedback * widen(k)
        k = l2_normalize(k)
        e = beta * (-g).exp()[..., None] * feedback * widen(k)
        return {
            "q": l2_normalize(corrected).to(q.dtype),
            "k": k,
            "v": (beta * widen(v)).to(v.dtype),
            "g": g,
            "e": e.to(k.dtype),
        }

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        init_A_log(self.A_log, 0.0, 16.0)
        init_dt_bias(self.dt_bias)
        nn.init.ones_(self.feedback)
        nn.init.constant_(self.D, self.correction)
