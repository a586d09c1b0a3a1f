"""Online scaled DeltaNet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llm.mixers.deltanet import DeltaNet
from llm.mixers.walk import Walk
from llm.model.precision import widen


class OnlineScaledDeltaNet(DeltaNet):
    """``S_t = S_{t-1} + beta_t (d_t * k_t) (v_t - S_{t-1}^T k_t)^T``, d a diagonal preconditioner (arXiv 2605.13473).

    DeltaNet whose write key is scaled channel by channel; the scale learns as it goes. The residual at k shrinks by
    1 - beta <d, k^2>, so the gradient of its square gives, with step size `eta` and forgetting `retention` = rho,

        d_{t+1} = 1 + rho (d_t - 1) + eta beta_t (1 - beta_t <d_t, k_t^2>) k_t^2,    d_1 = 1.

    Reduction: free erase keys beta k, values beta v, write keys d * k. The recursion of d - 1 is itself a delta rule,
    with keys k^2 and one value channel; reading it at k^2 yields its residuals, whose decayed sum is d - 1 itself (two
    small passes with a vector a head for a state).

    Inferred (the paper's text was not at hand): that hypergradient, d's initial value 1 and what it is forgotten to,
    `eta` and `retention`. Step sizes beta reach 1, not 2.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        eta: float = 0.5,
        retention: float = 0.99,
        **common: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, negative_eigenvalues=False, **common)
        if not 0 < eta < retention <= 1:
            raise ValueError(f"eta={eta}, retention={retention}: must be 0 < eta < retention <= 1")
        self.eta, self.retention = eta, retention

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        found = self.operands(x, *self.project(x, walk))
        k, v, beta = widen(found["k"]), found["v"], found.pop("beta")[..., None]
        found |= {
            "k": (k * self._preconditioner(k, beta, walk)).to(v.dtype),
            "e": (beta * k).to(v.dtype),
            "v": (beta * widen(v)).to(v.dtype),
        }
        return self.readout(self.recur(walk, found), x)

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        vectors = {
            "preconditioner": (self.num_heads, self.head_k_dim, 1),
            "scale": (self.num_heads, 1, self.head_k_dim),
        }
        return super().wide_state() | vectors

    def products(self) -> int:
        return super().products() + 5 * self.key_dim  # erase, write and read one, write and read the other

    def _preconditioner(self, k: Tensor, beta: Tensor, walk: Walk) -> Tensor:
        """d_t [.., H, K] from k [.., H, K] and beta [.., H, 1]."""
        squares, rho = k.square(), self.retention
        g = torch.full_like(beta[..., 0], math.log(rho))
        strength = self.eta * beta * beta
        z = self.eta * beta * (1 - beta * squares.sum(-1, keepdim=True))  # the residual where d is still 1
        found = walk.delta_rule(
            "preconditioner", q=squares, k=squares, v=z.to(k.dtype), g=g, e=strength * squares / rho, scale=1.0
        )
        # found = rho <d_t - 1, k^2> + r |k^2|^2 and r = z - strength <d_t - 1, k^2>, solved for r
        r = (rho * z - strength * widen(found)) / (rho - strength * squares.square().sum(-1, keepdim=True))
        one = torch.ones_like(squares[..., :1])
        excess = walk.linear_attention("scale", q=one, k=one, v=r * squares, g=g, scale=1.0, exclusive=True)
        return 1 + widen(excess) / rho
