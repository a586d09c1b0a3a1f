"""Error-free linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm.mixers.deltanet import DeltaNet
from llm.model.norm import l2_normalize
from llm.model.precision import widen

EPS = 1e-6


class ErrorFreeLinearAttention(DeltaNet):
    """``S_t = (I - a_t k_t k_t^T) S_{t-1} + a_t k_t v_t^T, a = (1 - exp(-beta |k|^2)) / |k|^2`` (arXiv 2512.12602).

    The delta rule is one Euler step of size beta along dS/dt = k (v - S^T k)^T; this is that equation's exact solution.
    Eigenvalues exp(-beta |k|^2) lie in (0, 1) however long a key is, so keys keep their length.

    Reduction: with s = sqrt(|k|^2 + eps), the ordinary delta rule on keys k / s with beta' = a s^2 and values v / s:
    no eigenvalue suffers from a key's rounding, and only v / s can be large.

    Inferred (the authors' language models are not published): beta = sigmoid(x W_b), queries of unit length, no output
    gate, as in DeltaNet.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, negative_eigenvalues=False, **common)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        beta, wide = torch.sigmoid(widen(self.b_proj(x))), widen(k)
        squared = wide.square().sum(-1)  # [.., H]
        length = (squared + EPS).sqrt()
        return {
            "q": l2_normalize(q),
            "k": (wide / length[..., None]).to(k.dtype),
            "v": (widen(v) / length[..., None]).to(v.dtype),
            "beta": exact_step(beta, squared) * (squared + EPS),
        }


def exact_step(beta: Tensor, squared: Tensor) -> Tensor:
    """``(1 - exp(-beta n)) / n`` of n = `squared` >= 0, which is beta where n is 0; both at least fp32."""
    n = beta * squared
    tiny = n < 1e-4  # where the quotient, and more so its gradient, is a difference of nearly equal numbers
    safe = torch.where(tiny, 1.0, n)
    return beta * torch.where(tiny, 1 - n / 2 + n * n / 6, -torch.expm1(-safe) / safe)
