"""RWKV-7."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm.mixers.recurrent import DeltaMixer
from llm.mixers.walk import Walk
from llm.model.norm import l2_normalize
from llm.model.precision import widen

LARGEST_DECAY = 0.6065306597126334  # exp(-1/2): a step keeps at least exp(-0.61) = 0.545 of a channel
# what is projected, and the power of its initial shares of the token before
SHIFTED = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}


class RWKV7(DeltaMixer):
    """``S_t = (Diag(w_t) - (a_t * kappa_t) kappa_t^T) S_{t-1} + k~_t v_t^T`` (Peng et al. 2025, arXiv 2503.14456).

    Every projection sees the token mixed with the one before by learned shares x_r, x_w, x_k, x_v, x_a, x_g. Of low
    rank are the decay log w = -0.61 sigmoid(.), the rate a = sigmoid(.) and the output gate. kappa is k * k_k at unit
    length, k~ = k (1 + (a - 1) k_a); the output is normalised head by head, gets the current token's r.(r_k k~) v, and
    is gated. `q_proj` is what the paper calls receptance.

    Reduction: what is erased, a * kappa, differs from what is written, so there are two micro-steps a token: (key
    a * kappa, erase key kappa / w, value 0, decay w) and (key k~, erase key 0, value v), read after the second; 1 / w
    is at most 1.84.

    Not as in the paper: matrices start from N(0, std), as of all mixers here; and there is no residual of the first
    layer's values, since a layer sees its own input only.
    """

    state_products = 5  # twice erase and write, read

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, norm_eps: float = 1e-5, **common: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, norm_eps=norm_eps, conv_size=None, selective_rope=None, **common)
        self.layer_idx, self.n_layers = layer_idx, n_layers  # read at initialisation only
        for name in SHIFTED:
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(d_model)))
        self.w_lora = lora(d_model, _rank(d_model, 2.5), self.key_dim, nn.Tanh())
        self.a_lora = lora(d_model, _rank(d_model, 2.5), self.key_dim, nn.Identity())
        self.k_k = nn.Parameter(torch.empty(self.key_dim))
        self.k_a = nn.Parameter(torch.empty(self.key_dim))
        self.r_k = nn.Parameter(torch.empty(self.num_heads, self.head_k_dim))
        self.o_norm = nn.GroupNorm(self.num_heads, self.value_dim, eps=self.head_k_dim * norm_eps)

    def make_output_gate(self) -> nn.Module:
        return lora(self.d_model, _rank(self.d_model, 5.0), self.value_dim, nn.Sigmoid(), bias=False)

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        change = walk.previous("shift", x) - x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + change * getattr(self, f"x_{name}").to(x.dtype) for name in SHIFTED)
        heads = lambda y: self.by_head(y, self.head_k_dim)  # noqa: E731
        r, k, v = heads(self.q_proj(x_r)), heads(self.k_proj(x_k)), self.by_head(self.v_proj(x_v), self.head_v_dim)
        walk.written = v.flatten(-2)
        log_w = -LARGEST_DECAY * torch.sigmoid(widen(heads(self.w_lora(x_w))))
        a = torch.sigmoid(widen(heads(self.a_lora(x_a))))
        kappa = l2_normalize(widen(k) * widen(heads(self.k_k)))
        k = widen(k) * (1 + (a - 1) * widen(heads(self.k_a)))
        o = self.recur(walk, self._micro_steps(r, k, v, kappa, a, log_w))
        bonus = (widen(r) * k * widen(self.r_k)).sum(-1, keepdim=True) * widen(v)
        normed = self._normalize(widen(o)) + bonus.flatten(-2)
        gate = self.g_proj(x_g)
        return self.o_proj((normed * widen(gate)).to(gate.dtype))

    def narrow_state(self) -> dict[str, tuple[int, ...]]:
        return {"shift": (self.d_model,)}

    @torch.no_grad()
    def reset_parameters(self, std: float) -> None:
        """The paper's: faster decay and stronger shifts for later channels, all of it weaker in later layers."""
        super().reset_parameters(std)
        first_to_last, gone = self.layer_idx / max(1, self.n_layers - 1), self.layer_idx / self.n_layers
        channel = torch.arange(self.d_model) / self.d_model
        for name, power in SHIFTED.items():
            getattr(self, f"x_{name}").copy_(1 - channel ** (power * (1 - gone)))
        ramp = torch.arange(self.key_dim) / (self.key_dim - 1)
        within = torch.arange(self.key_dim) % self.head_k_dim / (self.head_k_dim - 1) * 2 - 1  # -1 to 1 in each head
        zigzag = within * within.abs()
        self.w_lora[2].bias.copy_(-5.5 + 6 * ramp ** (1 + first_to_last**0.3) + 2.5 * zigzag)
        self.a_lora[2].bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (ramp - 0.5))
        self.k_k.copy_(0.71 - 0.1 * (ramp - 0.5))
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        self.o_norm.weight.fill_(((self.layer_idx + 1) / self.n_layers) ** 0.7)
        self.o_norm.bias.zero_()

    def _micro_steps(
        self, r: Tensor, k: Tensor, v: Tensor, kappa: Tensor, a: Tensor, log_w: Tensor
    ) -> dict[str, Tensor | float]:
        pair = lambda first, second: torch.stack([first, second], dim=-3)  # noqa: E731  [.., 2, H, K]
        none = torch.zeros_like(k)
        return {
            "q": r,
            "k": pair(a * kappa, k).to(v.dtype),
            "e": pair(kappa * (-log_w).exp(), none).to(v.dtype),
            "v": pair(torch.zeros_like(v), v),
            "g": pair(log_w, none),
            "scale": 1.0,
        }

    def _normalize(self, o: Tensor) -> Tensor:
        """o [.., H, V] -> [.., H V], each head to mean 0 and variance 1."""
        normed = F.layer_norm(o, (self.head_v_dim,), eps=self.o_norm.eps).flatten(-2)
        return normed * widen(self.o_norm.weight) + widen(self.o_norm.bias)


def lora(d_in: int, rank: int, d_out: int, activation: nn.Module, *, bias: bool = True) -> nn.Sequential:
    """Two linear maps through `rank` channels with an activation between."""
    return nn.Sequential(nn.Linear(d_in, rank, bias=False), activation, nn.Linear(rank, d_out, bias=bias))


def _rank(d_model: int, factor: float) -> int:
    """The paper's rule of thumb: growing with the square root of the width, in steps of 32."""
    return max(32, 32 * round(factor * d_model**0.5 / 32))
