"""Forgetting attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.base import MixerState
from llm.mixers.softmax import SoftmaxAttention
from llm.mixers.walk import Walk
from llm.model.biased import attend_biased, attend_biased_rows
from llm.model.precision import widen
from mixer_kernels.segments import Segments


class ForgettingAttention(SoftmaxAttention):
    """``logit_ts = q_t^T k_s / sqrt(K) + sum_{s < i <= t} log f_i``, f = sigmoid(x W_f + b_f), one a head.

    The Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130): softmax attention with the forget gate of a
    recurrent network, which replaces position embeddings. With `output_gate` and `qk_norm` it is the paper's "Pro"
    block but for its shift of keys and values by a token. b_f starts at 0.

    Reduction: log f summed up over the document is D, and the bias D_t - D_s. As a softmax over s does not see what is
    the same for all s, only D_s is needed; the cache keeps it, in fp32, beside keys and values.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        self.f_proj = nn.Linear(d_model, self.num_heads)

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        found = super().init_state(batch, max_context, device, dtype)
        slots, wide = found["k"].shape[1], torch.promote_types(dtype, torch.float32)
        kept = torch.zeros(batch, slots, self.num_heads, device=device, dtype=wide)
        return found | {"kept": kept, "kept_sum": torch.zeros(batch, self.num_heads, device=device, dtype=wide)}

    def state_bytes(self, context: int) -> int:
        return super().state_bytes(context) + 4 * self.num_heads * (min(context, self.window or context) + 1)

    def _project(self, x_BTD: Tensor, positions_BT: Tensor, walk: Walk) -> tuple[Tensor, dict[str, Tensor]]:
        q, new = super()._project(x_BTD, positions_BT, walk)
        return q, new | {"kept": walk.running_sum("kept_sum", F.logsigmoid(widen(self.f_proj(x_BTD))))}

    def _attend_causally(self, q: Tensor, new: dict[str, Tensor], segments: Segments) -> Tensor:
        return attend_biased_rows(q, new["k"], new["v"], -new["kept"], segments, self.window)

    def _attend(self, q: Tensor, held: dict[str, Tensor], visible_BTS: Tensor) -> Tensor:
        return attend_biased(q, held["k"], held["v"], -held["kept"], visible_BTS)
