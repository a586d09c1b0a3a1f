"""GateLoop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.recurrent import AdditiveMixer
from llm.mixers.walk import Walk
from llm.model.precision import widen
from llm.model.rotary import rotate_by


class GateLoop(AdditiveMixer):
    """``S_t = Diag(a_t) S_{t-1} + k_t v_t^T,  o_t = Re(S_t^T q_t)``, a = sigmoid(x W_a) exp(i x W_theta) complex.

    Katsch 2023, arXiv 2311.01927: linear attention whose forget gate is complex and depends on the token. Channels i
    and i + K/2 of q and k are the real and the imaginary part of one of K/2 complex channels.

    Reduction: phases telescope, so q and k are rotated by the running sum of the angles, and what is left is gated
    linear attention with magnitudes that two real channels share. Inferred: output as in gated linear attention (the
    paper's is a linear map and a SiLU gate), scale 1 / sqrt(K).
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, selective_rope=None, **common)
        if self.head_k_dim % 2:
            raise ValueError(f"head_k_dim={self.head_k_dim} is odd: complex channels are pairs; use an even size")
        self.a_proj = nn.Linear(d_model, self.key_dim // 2, bias=False)
        self.theta_proj = nn.Linear(d_model, self.key_dim // 2, bias=False)

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        q, k, v = self.project(x, walk)
        pairs = self.head_k_dim // 2
        angle = walk.running_sum("phase", self.by_head(self.theta_proj(x), pairs))
        g = F.logsigmoid(widen(self.by_head(self.a_proj(x), pairs)))
        q, k = rotate_by(q, angle), rotate_by(k, angle)
        return self.readout(self.recur(walk, {"q": q, "k": k, "v": v, "g": torch.cat([g, g], -1)}), x)

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        return super().wide_state() | {"phase": (self.num_heads, self.head_k_dim // 2)}
