"""Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.decay import init_A_log, init_dt_bias
from llm.mixers.recurrent import AdditiveMixer
from llm.mixers.walk import Walk
from llm.model.precision import widen


class Mamba2(AdditiveMixer):
    """``S_t = exp(-Delta_t A) S_{t-1} + Delta_t B_t x_t^T,  y_t = S_t^T C_t + D x_t``.

    Dao & Gu 2024, arXiv 2405.21060. Delta = softplus(x W_dt + dt_bias) and A > 0, one a head; B and C, of `state_size`,
    are shared by all heads; the values are `expand` times as wide as the model, in heads of `head_dim`. All three are
    convolved and SiLU. y is multiplied by SiLU of a gate, then RMS-normalised as a whole. A ~ U(1, 16), D = 1,
    softplus(dt_bias) log-uniform in [1e-3, 1e-1].

    Reduction: q = C, k = B, values Delta x, log-decay -Delta A, no output scale; one key head for all value heads.
    Not as in its code: the convolutions have no bias.
    """

    normalize_heads = False

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        state_size: int = 64,
        head_dim: int = 64,
        expand: int = 2,
        **common: Any,
    ) -> None:
        if expand * d_model % head_dim:
            raise ValueError(
                f"head_dim={head_dim} does not divide expand x d_model = {expand * d_model}: choose a divisor"
            )
        super().__init__(
            d_model, layer_idx, n_layers,
            head_k_dim=state_size, expand_v=head_dim / state_size, num_heads=expand * d_model // head_dim, key_heads=1,
            **common,
        )  # fmt: skip
        self.o_norm = nn.RMSNorm(self.value_dim, eps=self.o_norm.eps)
        self.dt_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        C, B, v = self.project(x, walk)
        delta = -F.logsigmoid(-(widen(self.dt_proj(x)) + widen(self.dt_bias)))  # softplus, [.., H]
        written = (delta[..., None] * widen(v)).to(v.dtype)
        g = -delta * widen(self.A_log).exp()
        o = self.recur(walk, {"q": C, "k": B, "v": written, "g": g, "scale": 1.0})
        y = widen(o) + widen(self.D)[:, None] * widen(v)
        return self.readout(y, x)

    def readout(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x)
        return self.o_proj(self.o_norm(o.flatten(-2) * F.silu(widen(gate))).to(gate.dtype))

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        init_A_log(self.A_log, 1.0, 16.0)
        init_dt_bias(self.dt_bias)
        nn.init.ones_(self.D)
