"""Kimi Delta Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.decay import bounded_log_decay, init_A_log, init_dt_bias, log_decay
from llm.mixers.recurrent import DeltaMixer, low_rank
from llm.model.norm import l2_normalize
from llm.model.precision import widen


class KimiDeltaAttention(DeltaMixer):
    """``S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T`` (Kimi Linear, arXiv 2510.26692).

    As Gated DeltaNet, with a decay for every key channel from a low-rank projection, and a low-rank sigmoid output
    gate. `gate_lower_bound` (for instance -5): the bounded gate ``lower_bound * sigmoid(exp(A_log) (f(x) + dt_bias))``
    in place of ``-exp(A_log) softplus(f(x) + dt_bias)``; A_log then begins at 0, else A ~ U(1, 16). `output_gate_bias`:
    a bias in the output gate, as flash-linear-attention's KDA has it.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        gate_lower_bound: float | None = None,
        negative_eigenvalues: bool = False,
        output_gate_bias: bool = False,
        **common: Any,
    ) -> None:
        self.output_gate_bias = output_gate_bias  # read by make_output_gate
        super().__init__(d_model, layer_idx, n_layers, gate_activation="sigmoid", **common)
        if gate_lower_bound is not None and gate_lower_bound >= 0:
            raise ValueError(f"gate_lower_bound={gate_lower_bound}: must be negative, for instance -5, or null")
        self.gate_lower_bound = gate_lower_bound
        self.beta_max = 2.0 if negative_eigenvalues else 1.0
        gates = self.num_heads * self.head_k_dim
        self.f_proj = low_rank(d_model, self.head_v_dim, gates)
        self.b_proj = nn.Linear(d_model, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(gates))

    def make_output_gate(self) -> nn.Module:
        return low_rank(self.d_model, self.head_v_dim, self.value_dim, bias=self.output_gate_bias)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {
            "q": l2_normalize(q),
            "k": l2_normalize(k),
            "v": v,
            "g": self._log_decay(x),
            "beta": self.beta_max * torch.sigmoid(widen(self.b_proj(x))),
        }

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        init_dt_bias(self.dt_bias)
        if self.gate_lower_bound is None:
            init_A_log(self.A_log, 1.0, 16.0)
        else:
            nn.init.zeros_(self.A_log)

    def _log_decay(self, x: Tensor) -> Tensor:
        """[.., H, K]"""
        f = self.f_proj(x).unflatten(-1, (self.num_heads, self.head_k_dim))
        A_log, dt_bias = self.A_log[:, None], self.dt_bias.view(self.num_heads, self.head_k_dim)
        if self.gate_lower_bound is None:
            return log_decay(f, A_log, dt_bias)
        return bounded_log_decay(f, A_log, dt_bias, self.gate_lower_bound)
