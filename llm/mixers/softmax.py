"""Causal softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.mixers.walk import Rows, Walk
from llm.model.attention import attend, attend_causally
from llm.model.precision import widen
from llm.model.rotary import rotate
from llm.model.shortconv import ShortConvolution
from mixer_kernels.segments import Segments


class SoftmaxAttention(TokenMixer):
    """``o_t = sum_{s <= t} softmax_s(q_t^T k_s / sqrt(K)) v_s``, causal within each document (Vaswani et al. 2017).

    Settings: `num_heads` (null: d_model / head_dim), `num_kv_heads` (fewer: grouped queries; null: as many),
    `head_dim`, `rope_theta` (null: no position embedding), `qk_norm` (RMSNorm of each head's queries and keys),
    `window` (see only the last `window` tokens; null: all), `output_gate` (multiply the output by sigmoid of a
    projection of the input).

    The state is a cache of keys and values with ``min(max_context, window)`` slots, used as a ring, and the position of
    the next token. Raises ValueError where heads do not fit together.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        head_dim: int = 64,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = True,
        window: int | None = None,
        output_gate: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        for name, value in {"num_heads": num_heads, "num_kv_heads": num_kv_heads}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more, or null")
        self.num_heads = num_heads or _divide(d_model, head_dim)
        self.num_kv_heads = num_kv_heads or self.num_heads
        self.head_dim, self.rope_theta, self.window = head_dim, rope_theta, window
        _check_heads(self.num_heads, self.num_kv_heads, head_dim, rope_theta, window)
        width, kv_width = self.num_heads * head_dim, self.num_kv_heads * head_dim
        self.q_proj = nn.Linear(d_model, width, bias=False)
        self.k_proj = nn.Linear(d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(width, d_model, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.g_proj = nn.Linear(d_model, width, bias=False) if output_gate else None

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        walk = Rows(segments, state)
        positions = walk.positions()
        q, new = self._project(x_BTD, positions, walk)
        if state is None:
            o = self._attend_causally(q, new, segments)
        else:
            held = {name: torch.cat([state[name].to(y.dtype), y], dim=1) for name, y in new.items()}
            cached = self._cache_visible(state, positions, segments)
            o = self._attend(q, held, torch.cat([cached, segments.visible(self.window)], dim=2))
        y = self._routed(self._output(o, x_BTD), new)
        if not return_state:
            return MixerOutput(y, None, {})
        if state is None:
            state = self.init_state(x_BTD.shape[0], x_BTD.shape[1], x_BTD.device, new["k"].dtype)
        return MixerOutput(y, walk.new_state | self._append(state, new, positions, segments), {})

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        one = Segments.whole_rows(x_BD.shape[0], 1, x_BD.device, continued=True)
        x_B1D, walk = x_BD[:, None], Rows(one, state)
        position_B1 = walk.positions()
        q, new = self._project(x_B1D, position_B1, walk)
        state = state | walk.new_state | self._append(state, new, position_B1, one)
        visible = self._cache_visible(state, position_B1, one)
        held = {name: state[name].to(y.dtype) for name, y in new.items()}
        return self._routed(self._output(self._attend(q, held, visible), x_B1D), new)[:, 0], state

    def route_values(self) -> None:
        if self.value_route is None:
            self.value_route = nn.Linear(self.v_proj.out_features, self.d_model, bias=False)

    def _routed(self, y: Tensor, new: dict[str, Tensor]) -> Tensor:
        return y if self.value_route is None else y + self.value_route(new["v"].flatten(-2))

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        slots = min(max_context, self.window or max_context)
        cache = torch.zeros(batch, slots, self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        return {"k": cache, "v": cache.clone(), "position": torch.zeros(batch, device=device, dtype=torch.int64)}

    def state_bytes(self, context: int) -> int:
        return 2 * 2 * self.num_kv_heads * self.head_dim * min(context, self.window or context)

    def state_elements(self) -> int:
        return 0

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        pairs = (sum_len_squared + tokens) // 2  # a token sees itself and what came before
        if self.window is not None:
            pairs = min(pairs, tokens * self.window)
        return 2 * tokens * matrices + 4 * pairs * self.num_heads * self.head_dim

    def reset_parameters(self, std: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm | ShortConvolution):
                module.reset_parameters()
        if self.value_route is not None:
            nn.init.zeros_(self.value_route.weight)

    def _project(self, x_BTD: Tensor, positions_BT: Tensor, walk: Walk) -> tuple[Tensor, dict[str, Tensor]]:
        """q [B, T, H, K], and what the cache keeps of each token: k, v [B, T, HKV, K], normalised and rotated."""
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim))  # noqa: E731
        q, k, v = heads(self.q_proj(x_BTD)), heads(self.k_proj(x_BTD)), heads(self.v_proj(x_BTD))
        q, k = self.q_norm(widen(q)).to(v.dtype), self.k_norm(widen(k)).to(v.dtype)
        q, k = self._rotate(q, k, x_BTD, positions_BT, walk)
        return q, {"k": k, "v": v}

    def _rotate(self, q: Tensor, k: Tensor, x_BTD: Tensor, positions_BT: Tensor, walk: Walk) -> tuple[Tensor, Tensor]:
        """Give q and k their positions."""
        if self.rope_theta is None:
            return q, k
        return rotate(q, positions_BT, self.rope_theta), rotate(k, positions_BT, self.rope_theta)

    def _attend_causally(self, q: Tensor, new: dict[str, Tensor], segments: Segments) -> Tensor:
        """Within the documents of rows, from what `_project` gives."""
        return attend_causally(q, new["k"], new["v"], segments, self.window)

    def _attend(self, q: Tensor, held: dict[str, Tensor], visible_BTS: Tensor) -> Tensor:
        """To what is held of S tokens, where it is visible."""
        return attend(q, held["k"], held["v"], visible_BTS)

    def _output(self, o_BTHK: Tensor, x_BTD: Tensor) -> Tensor:
        o_BTD = o_BTHK.flatten(-2)
        if self.g_proj is not None:
            o_BTD = o_BTD * torch.sigmoid(self.g_proj(x_BTD))
        return self.o_proj(o_BTD)

    def _cache_visible(self, state: MixerState, positions_BT: Tensor, segments: Segments) -> Tensor:
        """bool [B, T, slots]: which cached keys the tokens of continued documents see."""
        slots = state["k"].shape[1]
        newest = state["position"][:, None] - 1  # [B, 1]
        slot = torch.arange(slots, device=newest.device)
        held = newest - (newest - slot) % slots  # position that each slot of the ring holds, negative while empty
        visible = (held >= 0)[:, None] & (segments.row_start < 0)[..., None]
        if self.window is not None:
            visible = visible & (held[:, None] > positions_BT[..., None] - self.window)
        return visible

    def _append(
        self, state: MixerState, new: dict[str, Tensor], positions_BT: Tensor, segments: Segments
    ) -> MixerState:
        """The cache with the newest tokens of each row's last document written to their slots."""
        slots, last = state["k"].shape[1], positions_BT[:, -1:]
        kept = (segments.row_start == segments.row_start[:, -1:]) & (positions_BT > last - slots)
        slot_BT = torch.where(kept, positions_BT % slots, slots)  # what is not kept goes to a slot that is cut off
        written = {name: _scatter_tokens(state[name], slot_BT, y) for name, y in new.items()}
        return written | {"position": last[:, 0] + 1}


def _scatter_tokens(cache: Tensor, slot_BT: Tensor, new: Tensor) -> Tensor:
    """cache [B, S, ...] with new [B, T, ...] at slots [B, T]; slot S is dropped."""
    padded = torch.cat([cache, cache[:, :1]], dim=1)
    index = slot_BT.view(*slot_BT.shape, *[1] * (new.ndim - 2)).expand_as(new)
    return padded.scatter(1, index, new.to(cache.dtype))[:, :-1]


def _divide(d_model: int, head_dim: int) -> int:
    if d_model % head_dim:
        raise ValueError(f"head_dim={head_dim} does not divide d_model={d_model}: choose a divisor, or set num_heads")
    return d_model // head_dim


def _check_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, rope_theta: float | None, window: int | None
) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: choose a divisor")
    if rope_theta is not None and head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} is odd: rotary embedding rotates pairs; use an even size, or rope_theta=null"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, or null for all tokens")
