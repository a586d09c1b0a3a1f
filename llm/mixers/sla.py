"""Softmax linear attention: heads compete."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from llm.mixers.gla import GatedLinearAttention
from llm.model.precision import widen


class SoftmaxLinearAttention(GatedLinearAttention):
    """``S_t = Diag(exp g_t) S_{t-1} + G^k_h k_t v_t^T,  o_t = G^q_h S_t^T q_t``, G a softmax over heads of x W.

    Xu et al. 2026, arXiv 2602.01744: gated linear attention (theirs also RetNet and Gated DeltaNet) whose heads are
    slots that compete for a token, when it is written and when it reads.

    Reduction: a scale of values and of outputs. Inferred: G is multiplied by the number of heads, so that even
    competition changes nothing; the reading G acts after each head's output is normalised, which would undo it.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        self.read_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.write_proj = nn.Linear(d_model, self.num_heads, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        written = (widen(v) * self._shares(self.write_proj(x))).to(v.dtype)
        return super().operands(x, q, k, written)

    def readout(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.by_head(self.g_proj(x), self.head_v_dim)
        normed = self.o_norm(o, gate) * self._shares(self.read_proj(x)).to(gate.dtype)
        return self.o_proj(normed.flatten(-2))

    def _shares(self, logits: Tensor) -> Tensor:
        """[.., H] -> [.., H, 1], 1 on average over the heads."""
        return self.num_heads * widen(logits).softmax(-1)[..., None]
