"""Lightning attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.mixers.recurrent import AdditiveMixer
from llm.model.precision import widen


class LightningAttention(AdditiveMixer):
    """``S_t = lambda_h S_{t-1} + k_t v_t^T``, lambda = exp(-(8 h / H) (1 - l / L)) in head h = 1..H of layer l of L.

    The attention of TransNormerLLM (Qin et al. 2023, arXiv 2307.14995), whose tiled form is Lightning Attention-2
    (arXiv 2401.04658): fixed decays, slower from layer to layer; q and k are SiLU; the output is RMS-normalised as a
    whole and multiplied by a gate. The recurrence is RetNet's.

    Inferred: the gate is a sigmoid (MiniMax-01, arXiv 2501.08313). Left out: the rotation that the first layer of
    TransNormerLLM has.
    """

    normalize_heads = False

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, gate_activation="sigmoid", **common)
        self.depth = layer_idx / n_layers
        self.register_buffer("log_lambda", torch.empty(self.num_heads))

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        g = widen(self.log_lambda).expand(v.shape[:-1])
        return {"q": F.silu(q), "k": F.silu(k), "v": v, "g": g}

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        head = torch.arange(1, self.num_heads + 1, device=self.log_lambda.device)
        self.log_lambda.copy_(-(8 * head / self.num_heads) * (1 - self.depth))
