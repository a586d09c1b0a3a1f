"""Curvature-conditioned query on Gated DeltaNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.gdn import GatedDeltaNet
from llm.mixers.walk import Walk
from llm.model.precision import widen


class CurvatureConditionedQuery(GatedDeltaNet):
    """``o_t = S_t^T (I - lambda_t C_t) q_t``, C_t the decayed mean of k_s k_s^T up to t, S_t as of Gated DeltaNet.

    Le et al. 2026, arXiv 2606.01294: the query turns away from the directions in which memory is dense before it reads.
    lambda = sigmoid(w . q + b), one a head; what is written is as in Gated DeltaNet.

    Reduction: C_t q_t is linear attention with keys for values and the decay of the state, over the same pass's sum of
    decays; then the delta rule is read with the new query. The state is that of both, K (V + K) a head.

    Inferred: the paper normalises C in a way that was not at hand. As a mean over unit keys its trace is 1, so that
    I - lambda C never turns a query round. w starts from N(0, std), b at 0.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        self.lambda_weight = nn.Parameter(torch.empty(self.num_heads, self.head_k_dim))
        self.lambda_bias = nn.Parameter(torch.empty(self.num_heads))

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        found = self.operands(x, *self.project(x, walk))
        q, k, g, one = found["q"], found["k"], found["g"], torch.ones_like(found["k"][..., :1])
        dense = walk.linear_attention("covariance", q=q, k=k, v=k, g=g, scale=1.0, impl=self.impl)
        mass = walk.linear_attention("mass", q=one, k=one, v=one, g=g, scale=1.0)  # at least 1: the token itself
        logit = (widen(q) * widen(self.lambda_weight)).sum(-1, keepdim=True) + widen(self.lambda_bias)[:, None]
        turned = widen(q) - torch.sigmoid(logit) * widen(dense) / widen(mass)
        return self.readout(self.recur(walk, found | {"q": turned.to(q.dtype)}), x)

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        heads, size = self.num_heads, self.head_k_dim
        return super().wide_state() | {"covariance": (heads, size, size), "mass": (heads, 1, 1)}

    def products(self) -> int:
        return super().products() + 2 * self.num_heads * (self.head_k_dim**2 + 1)  # write and read

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        nn.init.normal_(self.lambda_weight, std=std)
        nn.init.zeros_(self.lambda_bias)
