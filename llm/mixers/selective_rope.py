"""Softmax attention with selective rotary positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from llm.mixers.base import MixerState
from llm.mixers.rotation import SelectiveRotation
from llm.mixers.softmax import SoftmaxAttention
from llm.mixers.walk import Walk
from llm.model.rotary import rotate_by


class SelectiveRopeAttention(SoftmaxAttention):
    """Softmax attention whose queries and keys are rotated by angles that tokens choose.

    Selective RoPE, Movahedi et al. 2025, arXiv 2511.17388:
    ``logit_ts = q_t^T R(theta_t - theta_s) k_s / sqrt(K)`` with theta as in `SelectiveRotation`, whose projection has
    rank `rank`. All else is `SoftmaxAttention`'s, without grouped queries. The cache keeps rotated keys, the last phase
    and the last inputs of the convolution.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, rank: int = 32, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, rope_theta=None, **settings)
        self.rotation = SelectiveRotation(d_model, self.num_heads, self.head_dim, rank=rank)

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        wide = torch.promote_types(dtype, torch.float32)
        kinds = ((self.rotation.wide_state(), wide), (self.rotation.narrow_state(), dtype))
        return super().init_state(batch, max_context, device, dtype) | {
            name: torch.zeros(batch, *shape, device=device, dtype=kind)
            for shapes, kind in kinds
            for name, shape in shapes.items()
        }

    def state_bytes(self, context: int) -> int:
        elements = lambda shapes: sum(math.prod(shape) for shape in shapes.values())  # noqa: E731
        rotation = 4 * elements(self.rotation.wide_state()) + 2 * elements(self.rotation.narrow_state())
        return super().state_bytes(context) + rotation

    def _rotate(self, q: Tensor, k: Tensor, x_BTD: Tensor, positions_BT: Tensor, walk: Walk) -> tuple[Tensor, Tensor]:
        angle = self.rotation(x_BTD, walk)
        return rotate_by(q, angle), rotate_by(k, angle)
