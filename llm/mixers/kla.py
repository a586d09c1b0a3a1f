"""Kaczmarz linear attention."""

from __future__ import annotations

from torch import Tensor

from llm.mixers.gdn import GatedDeltaNet
from llm.model.precision import widen

EPS = 1e-6


class KaczmarzLinearAttention(GatedDeltaNet):
    """``S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, b = eta / (|k|^2 + eps)``, raw keys.

    Zou et al. 2026, arXiv 2605.08587. The step of Kaczmarz's method for S^T k = v: eta = 1 makes the state answer a key
    of any length exactly with its value. eta = sigmoid(x W_b); decay, convolutions and output as in Gated DeltaNet;
    queries are as long as they are.

    Reduction: with s = sqrt(|k|^2 + eps), exactly Gated DeltaNet on keys k / s and values v / s with beta = eta. So
    what it adds is that a value is divided by the length of its key. Keys shorter than sqrt(eps) = 0.001, which no key
    of a trained model has, are the only ones whose values grow beyond bounds.
    """

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        length = (widen(k).square().sum(-1, keepdim=True) + EPS).sqrt()
        found = super().operands(x, q, k, (widen(v) / length).to(v.dtype))
        return found | {"q": q, "k": (widen(k) / length).to(k.dtype)}
