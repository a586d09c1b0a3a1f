"""Preconditioned Gated DeltaNet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.decay import init_A_log, init_dt_bias, log_decay
from llm.mixers.gdn import GatedDeltaNet
from llm.mixers.walk import Walk
from llm.model.precision import widen

EPS = 1e-6


class PreconditionedGatedDeltaNet(GatedDeltaNet):
    """``S_t = exp(g_t) S_{t-1} + beta_t (M_t k_t) (v_t - exp(g_t) S_{t-1}^T k_t)^T`` (arXiv 2604.21100).

    Gated DeltaNet whose write key is scaled by the curvature that its channels have seen: A_t = exp(g') A_{t-1} + beta'
    k_t^2 with a decay and a rate of its own, r = log(A + eps) - c with c learned a head (at first -0.2), and M = x **
    (-r / (1 + |r|)), between 1/x and x for x = `squash`, at most 2.

    Reduction: A is linear attention with keys of size 1 and values beta' k^2; then a free erase key beta k, values
    beta v and write keys M k. Read from the port in flash-linear-attention.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, squash: float = 1.5, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        if not 1 < squash <= 2:
            raise ValueError(f"squash={squash}: must be above 1 and at most 2, beyond which eigenvalues leave [-1, 1]")
        self.log_squash = math.log(squash)
        self.curvature_a_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.curvature_b_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.curvature_A_log = nn.Parameter(torch.empty(self.num_heads))
        self.curvature_dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.center = nn.Parameter(torch.empty(self.num_heads))

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        found = self.operands(x, *self.project(x, walk))
        k, v, beta = found["k"], found["v"], found.pop("beta")[..., None]
        write = widen(k) * self._preconditioner(x, k, walk)
        found |= {
            "k": write.to(k.dtype),
            "e": (beta * widen(k)).to(k.dtype),
            "v": (beta * widen(v)).to(v.dtype),
        }
        return self.readout(self.recur(walk, found), x)

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        return super().wide_state() | {"curvature": (self.num_heads, 1, self.head_k_dim)}

    def products(self) -> int:
        return super().products() + 2 * self.key_dim  # write and read the curvature

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        init_A_log(self.curvature_A_log, 0.0, 16.0)
        init_dt_bias(self.curvature_dt_bias)
        nn.init.constant_(self.center, -0.2)

    def _preconditioner(self, x: Tensor, k: Tensor, walk: Walk) -> Tensor:
        """M [.., H, K]"""
        g = log_decay(self.curvature_a_proj(x), self.curvature_A_log, self.curvature_dt_bias)
        rate = torch.sigmoid(widen(self.curvature_b_proj(x)))[..., None]
        one, squares = torch.ones_like(k[..., :1]), (rate * widen(k).square()).to(k.dtype)
        curvature = walk.linear_attention("curvature", q=one, k=one, v=squares, g=g, scale=1.0)
        r = (widen(curvature).clamp(min=0.0) + EPS).log() - widen(self.center)[:, None]
        return (-self.log_squash * r / (1 + r.abs())).exp()
