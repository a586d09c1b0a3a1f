"""Linear attention without gates."""

from __future__ import annotations

import torch
from torch import Tensor

from llm.mixers.recurrent import RecurrentMixer
from mixer_kernels.linear_attention import linear_attention, linear_attention_step


class LinearAttention(RecurrentMixer):
    """``S_t = S_{t-1} + phi(k_t) v_t^T,  o_t = S_t^T phi(q_t)``, phi(x) = elu(x) + 1 (Katharopoulos et al. 2020).

    The paper divides o_t by phi(q_t) . sum of phi(k_s), a positive number for each token and head. The RMS norm of each
    head's output takes any such factor away, so there is no division (as Qin et al. 2022, arXiv 2210.10340, have it).
    The output is multiplied by SiLU of a gate. Nothing is ever forgotten: the plain additive memory to compare with.
    """

    operator = linear_attention
    operator_step = linear_attention_step
    state_products = 2  # write, read

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        head_k_dim: int = 128,
        expand_v: float = 2.0,
        num_heads: int | None = None,
        conv_size: int | None = 4,
        norm_eps: float = 1e-6,
        impl: str = "auto",
    ) -> None:
        super().__init__(
            d_model, layer_idx, n_layers,
            head_k_dim=head_k_dim, expand_v=expand_v, num_heads=num_heads, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation="silu", impl=impl,
        )  # fmt: skip

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        return {"q": _feature(q), "k": _feature(k), "v": v}


def _feature(x: Tensor) -> Tensor:
    """elu(x) + 1, in the dtype of x (autocast would widen exp)."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp().to(x.dtype))
