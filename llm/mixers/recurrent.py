"""What mixers with a recurrent matrix state have in common: everything but their gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.model.norm import GatedRMSNorm
from llm.model.shortconv import ShortConvolution
from mixer_kernels.segments import Segments


class RecurrentMixer(TokenMixer):
    """Projections, short convolutions, one operator of `mixer_kernels`, gated output normalisation.

    A subclass names the operator, and computes from the layer's input what the operator takes besides q, k and v
    (gates, learning rates). `forward` and `step` are derived, so that they cannot disagree.

    Common settings: `head_k_dim`, `expand_v` (value size of a head / key size), `num_heads` (null: as many as make the
    values d_model wide), `conv_size` (taps of the convolutions on q, k and v; null: none), `norm_eps`, `impl`
    (implementation of the operator, see `mixer_kernels`).

    The state is ``recurrent`` [B, H, K, V] in fp32 and, with convolutions, the last inputs of q, k and v. Raises
    ValueError where heads do not fit the width.
    """

    operator: Callable[..., tuple[Tensor, Tensor]]
    operator_step: Callable[..., tuple[Tensor, Tensor]]
    # matrix products with the state for each token and head, each 2 K V FLOPs
    state_products: int

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        head_k_dim: int,
        expand_v: float,
        num_heads: int | None,
        conv_size: int | None,
        norm_eps: float,
        gate_activation: str,
        impl: str,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.head_k_dim, self.head_v_dim = head_k_dim, _whole(head_k_dim * expand_v, head_k_dim, expand_v)
        self.num_heads = num_heads or _heads(d_model, self.head_v_dim)
        self.impl = impl
        self.key_dim, self.value_dim = self.num_heads * head_k_dim, self.num_heads * self.head_v_dim
        self.q_proj = nn.Linear(d_model, self.key_dim, bias=False)
        self.k_proj = nn.Linear(d_model, self.key_dim, bias=False)
        self.v_proj = nn.Linear(d_model, self.value_dim, bias=False)
        self.g_proj = self.make_output_gate()
        self.o_norm = GatedRMSNorm(self.head_v_dim, eps=norm_eps, activation=gate_activation)
        self.o_proj = nn.Linear(self.value_dim, d_model, bias=False)
        sizes = {"q_conv1d": self.key_dim, "k_conv1d": self.key_dim, "v_conv1d": self.value_dim}
        self.conv_names = tuple(sizes) if conv_size else ()
        for name in self.conv_names:
            setattr(self, name, ShortConvolution(sizes[name], conv_size))

    def make_output_gate(self) -> nn.Module:
        """The projection [.., D] -> [.., H V] whose activation multiplies the normalised output."""
        return nn.Linear(self.d_model, self.value_dim, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """What the operator takes, by name, from the input x [.., D] and q, k [.., H, K], v [.., H, V].

        The leading dimensions are [B, T] in `forward` and [B] in `step`.
        """
        raise NotImplementedError

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        state, new_state = state or {}, {}
        qkv = [self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)]
        for i, name in enumerate(self.conv_names):
            qkv[i], new_state[name] = getattr(self, name)(qkv[i], segments, state.get(name))
        o, new_state["recurrent"] = type(self).operator(
            **self.operands(x_BTD, *self._heads(*qkv)),
            segments=segments,
            initial_state=state.get("recurrent"),
            impl=self.impl,
        )
        return MixerOutput(self._readout(o, x_BTD), new_state if return_state else None, {})

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        new_state = {}
        qkv = [self.q_proj(x_BD), self.k_proj(x_BD), self.v_proj(x_BD)]
        for i, name in enumerate(self.conv_names):
            qkv[i], new_state[name] = getattr(self, name).step(qkv[i], state[name])
        operands = self.operands(x_BD, *self._heads(*qkv))
        o, new_state["recurrent"] = type(self).operator_step(**operands, state=state["recurrent"], impl=self.impl)
        return self._readout(o, x_BD), new_state

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        state = {name: getattr(self, name).init_state(batch, device, dtype) for name in self.conv_names}
        shape = (batch, self.num_heads, self.head_k_dim, self.head_v_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return {"recurrent": torch.zeros(shape, device=device, dtype=wide), **state}

    def state_bytes(self, context: int) -> int:
        convolutions = [getattr(self, name) for name in self.conv_names]
        return 4 * self.state_elements() + 2 * sum((c.size - 1) * c.weight.shape[0] for c in convolutions)

    def state_elements(self) -> int:
        return self.num_heads * self.head_k_dim * self.head_v_dim

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 2 * tokens * (matrices + self.state_products * self.state_elements())

    def reset_parameters(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, ShortConvolution):
                module.reset_parameters()
            elif isinstance(module, GatedRMSNorm):
                nn.init.ones_(module.weight)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = lambda x: x.unflatten(-1, (self.num_heads, -1))  # noqa: E731
        return split(q), split(k), split(v)

    def _readout(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.g_proj(x).unflatten(-1, (self.num_heads, self.head_v_dim))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))


def low_rank(d_in: int, rank: int, d_out: int, *, bias: bool = False) -> nn.Sequential:
    """Two linear maps through `rank` channels; the bias, if any, is on the second."""
    return nn.Sequential(nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=bias))


def _heads(d_model: int, head_v_dim: int) -> int:
    if d_model % head_v_dim:
        raise ValueError(
            f"head_k_dim x expand_v = {head_v_dim} does not divide d_model={d_model}: "
            "choose sizes whose product divides it, or set num_heads"
        )
    return d_model // head_v_dim


def _whole(size: float, head_k_dim: int, expand_v: float) -> int:
    if size != int(size) or size < 1:
        raise ValueError(f"head_k_dim={head_k_dim} x expand_v={expand_v} is no whole number: choose another expand_v")
    return int(size)
