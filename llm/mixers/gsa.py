"""Gated slot attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.recurrent import AdditiveMixer
from llm.mixers.walk import Walk
from llm.model.precision import widen


class GatedSlotAttention(AdditiveMixer):
    """Softmax over `num_slots` gated slots (Zhang et al. 2024, arXiv 2409.07146).

    ``K_t = Diag(f_t) K_{t-1} + (1 - f_t) k_t^T``, the same for the values V_t, and ``o_t = V_t^T softmax(K_t q_t)``;
    f = exp(logsigmoid(x W_f) / `gate_normalizer`), one a slot and head. q, k and v are SiLU; SiLU of the output is
    RMS-normalised as a whole; no output gate.

    Reduction: two passes of linear attention. The first, with the slots as value channels and the decay on them, gives
    K_t q_t; the second has the softmax of it for queries and 1 - f for keys. The state are both, M (K + V) a head.
    """

    normalize_heads = False

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        num_slots: int = 64,
        gate_normalizer: float = 8.0,
        **common: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, gate_activation=None, **common)
        self.num_slots, self.gate_normalizer = num_slots, gate_normalizer
        self.f_proj = nn.Linear(d_model, self.num_heads * num_slots, bias=False)

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        q, k, v = (F.silu(y) for y in self.project(x, walk))
        log_f = F.logsigmoid(widen(self.by_head(self.f_proj(x), self.num_slots))) / self.gate_normalizer  # [.., H, M]
        taken = (-log_f.expm1()).to(k.dtype)
        scores = walk.linear_attention("recurrent", q=q, k=k, v=taken, gv=log_f, scale=1.0, impl=self.impl)
        share = widen(scores).softmax(-1).to(k.dtype)
        o = walk.linear_attention("recurrent_values", q=share, k=taken, v=v, g=log_f, scale=1.0, impl=self.impl)
        return self.readout(F.silu(o), x)

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        heads, slots = self.num_heads, self.num_slots
        matrices = {"recurrent": (heads, self.head_k_dim, slots), "recurrent_values": (heads, slots, self.head_v_dim)}
        return super().wide_state() | matrices

    def products(self) -> int:
        return self.state_products * self.state_elements()
