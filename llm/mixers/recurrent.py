"""What mixers with a recurrent matrix state have in common: everything but their gates."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.mixers.rotation import SelectiveRotation
from llm.mixers.walk import OneToken, Operator, Rows, Walk
from llm.model.norm import GatedRMSNorm
from llm.model.precision import widen
from llm.model.rotary import rotate_by
from llm.model.shortconv import ShortConvolution
from mixer_kernels.delta_rule import delta_rule, delta_rule_step
from mixer_kernels.dispatch import IMPLEMENTATIONS
from mixer_kernels.linear_attention import linear_attention, linear_attention_step
from mixer_kernels.segments import Segments


class RecurrentMixer(TokenMixer):
    """Projections, short convolutions, one operator of `mixer_kernels`, gated output normalisation.

    A subclass names the operator, and computes from the layer's input what the operator takes besides q, k and v
    (gates, learning rates) in `operands`; one that needs more than an operator writes `mix`. `forward` and `step` are
    derived, so that they cannot disagree.

    Common settings: `head_k_dim`, `expand_v` (value size of a head / key size), `num_heads` (null: as many as make the
    values d_model wide), `conv_size` (taps of the convolutions on q, k and v; null: none), `norm_eps`, `impl`
    (implementation of the operator, see `mixer_kernels`), `selective_rope` (rank of the projection of angles by which
    q and k are rotated, see `SelectiveRotation`; null: no rotation). Of the class: `gate_activation` (of the output
    gate; null: no gate, the normalisation alone), `key_heads` (heads of q and k that value heads share; null: each its
    own).

    The state is ``recurrent`` [B, H, K, V] in fp32 and, with convolutions, the last inputs of q, k and v; `wide_state`
    and `narrow_state` list more. Raises ValueError where heads do not fit the width.
    """

    operator: Operator
    operator_step: Operator
    # matrix products with the state for each token and head, each 2 K V FLOPs
    state_products: int
    counts_positions = False  # the state holds the position of the next token
    normalize_heads = True  # each head's output for itself, not the layer's as a whole

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        head_k_dim: int = 128,
        expand_v: float = 1.0,
        num_heads: int | None = None,
        conv_size: int | None = 4,
        norm_eps: float = 1e-6,
        gate_activation: str | None = "silu",
        key_heads: int | None = None,
        selective_rope: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={impl!r}: choose one of {', '.join(IMPLEMENTATIONS)}")
        for name, value in {"num_heads": num_heads, "conv_size": conv_size}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more, or null")
        self.head_k_dim, self.head_v_dim = head_k_dim, _whole(head_k_dim * expand_v, head_k_dim, expand_v)
        self.num_heads = num_heads or _heads(d_model, self.head_v_dim)
        self.impl = impl
        self.key_heads = key_heads or self.num_heads
        self.key_dim, self.value_dim = self.key_heads * head_k_dim, self.num_heads * self.head_v_dim
        sizes = self.projected()
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(d_model, size, bias=False))
        self.g_proj = self.make_output_gate() if gate_activation else None
        normed = self.head_v_dim if self.normalize_heads else self.value_dim
        self.o_norm = (
            GatedRMSNorm(normed, eps=norm_eps, activation=gate_activation)
            if gate_activation
            else nn.RMSNorm(normed, eps=norm_eps)
        )
        self.o_proj = nn.Linear(self.value_dim, d_model, bias=False)
        self.conv_names = tuple(f"{name}_conv1d" for name in sizes) if conv_size else ()
        for name in self.conv_names:
            setattr(self, name, ShortConvolution(sizes[name[0]], conv_size))
        self.rotation = (
            SelectiveRotation(d_model, self.key_heads, head_k_dim, rank=selective_rope) if selective_rope else None
        )

    def projected(self) -> dict[str, int]:
        """Widths of the projections q, k and v."""
        return {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}

    def make_output_gate(self) -> nn.Module:
        """The projection [.., D] -> [.., H V] whose activation multiplies the normalised output."""
        return nn.Linear(self.d_model, self.value_dim, bias=False)

    def operands(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """What the operator takes, by name, from the input x [.., D] and q, k [.., H, K], v [.., H, V].

        The leading dimensions are [B, T] in `forward` and [B] in `step`. Where a token has n micro-steps, all but q
        have them as an axis before the heads.
        """
        raise NotImplementedError

    def mix(self, x: Tensor, walk: Walk) -> Tensor:
        """y [.., D] of the input x [.., D]."""
        o = self.recur(walk, self.operands(x, *self.project(x, walk)))
        return self.readout(o, x)

    def project(self, x: Tensor, walk: Walk) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [.., H, K] and v [.., H, V], projected and convolved."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.conv_names:
            q, k, v = (
                walk.convolve(name, getattr(self, name), y) for name, y in zip(self.conv_names, (q, k, v), strict=True)
            )
        walk.written = v
        q, k, v = self.by_head(q, self.head_k_dim), self.by_head(k, self.head_k_dim), self.by_head(v, self.head_v_dim)
        if self.rotation is not None:
            angle = self.rotation(x, walk)
            q, k = rotate_by(q, angle), rotate_by(k, angle)
        return q, k, v

    def recur(self, walk: Walk, operands: dict[str, Tensor]) -> Tensor:
        """The operator over the state ``recurrent``: o [.., H, V]."""
        kind = type(self)
        return walk.recur("recurrent", kind.operator, kind.operator_step, impl=self.impl, **operands)

    def readout(self, o: Tensor, x: Tensor) -> Tensor:
        """Normalise o [.., H, V], gate it by x, project: [.., D]."""
        shape = o.shape if self.normalize_heads else o.flatten(-2).shape
        o = o.reshape(shape)
        if self.g_proj is None:
            normed = self.o_norm(widen(o)).to(o.dtype)
        else:
            normed = self.o_norm(o, self.g_proj(x).view(shape))
        return self.o_proj(normed.flatten(-2) if self.normalize_heads else normed)

    def by_head(self, x: Tensor, size: int) -> Tensor:
        """[.., H size] -> [.., H, size]."""
        return x.unflatten(-1, (-1, size))

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        walk = Rows(segments, state, self.watch)
        y = self._routed(self.mix(x_BTD, walk), walk)
        return MixerOutput(y, walk.new_state if return_state else None, {})

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        walk = OneToken(state)
        return self._routed(self.mix(x_BD, walk), walk), walk.new_state

    def route_values(self) -> None:
        if self.value_route is None:
            self.value_route = nn.Linear(self.v_proj.out_features, self.d_model, bias=False)

    def _routed(self, y: Tensor, walk: Walk) -> Tensor:
        return y if self.value_route is None else y + self.value_route(walk.written)

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        """Shapes, without the batch, of what recurs: in fp32."""
        rotation = {} if self.rotation is None else self.rotation.wide_state()
        return {"recurrent": (self.num_heads, self.head_k_dim, self.head_v_dim), **rotation}

    def narrow_state(self) -> dict[str, tuple[int, ...]]:
        """Shapes, without the batch, of what is remembered of the latest tokens: in the activations' dtype."""
        convolutions = {name: getattr(self, name) for name in self.conv_names}
        rotation = {} if self.rotation is None else self.rotation.narrow_state()
        return {name: (c.size - 1, c.weight.shape[0]) for name, c in convolutions.items()} | rotation

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        wide = torch.promote_types(dtype, torch.float32)
        kinds = ((self.wide_state(), wide), (self.narrow_state(), dtype))
        state = {
            name: torch.zeros(batch, *shape, device=device, dtype=kind)
            for shapes, kind in kinds
            for name, shape in shapes.items()
        }
        if self.counts_positions:
            state["position"] = torch.zeros(batch, device=device, dtype=torch.int64)
        return state

    def state_bytes(self, context: int) -> int:
        elements = lambda shapes: sum(math.prod(shape) for shape in shapes.values())  # noqa: E731
        return 4 * elements(self.wide_state()) + 2 * elements(self.narrow_state())

    def state_elements(self) -> int:
        matrices = (shape for shape in self.wide_state().values() if len(shape) == 3 and min(shape[1:]) > 1)
        return sum(math.prod(shape) for shape in matrices)

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 2 * tokens * (matrices + self.products())

    def products(self) -> int:
        """Multiplications of a token with the state."""
        return self.state_products * math.prod(self.wide_state()["recurrent"])

    def reset_parameters(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, ShortConvolution):
                module.reset_parameters()
            elif isinstance(module, GatedRMSNorm | nn.RMSNorm):
                nn.init.ones_(module.weight)
        if self.value_route is not None:
            nn.init.zeros_(self.value_route.weight)


class AdditiveMixer(RecurrentMixer):
    """What only ever adds to a decaying state: `linear_attention`."""

    operator = linear_attention
    operator_step = linear_attention_step
    state_products = 2  # write, read


class DeltaMixer(RecurrentMixer):
    """What replaces, in a decaying state, the value found under a key: `delta_rule`."""

    operator = delta_rule
    operator_step = delta_rule_step
    state_products = 3  # erase, write, read


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
