"""Causal softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.model.attention import attend, attend_causally
from llm.model.precision import widen
from llm.model.rotary import rotate
from mixer_kernels.segments import Segments


class SoftmaxAttention(TokenMixer):
    """Multi-head softmax attention (Vaswani et al. 2017), causal within each document.

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
        positions = segments.positions(None if state is None else state["position"])
        q, k, v = self._project(x_BTD, positions)
        if state is None:
            o = attend_causally(q, k, v, segments, self.window)
        else:
            keys = torch.cat([state["k"].to(k.dtype), k], dim=1)
            values = torch.cat([state["v"].to(v.dtype), v], dim=1)
            cached = self._cache_visible(state, positions, segments)
            o = attend(q, keys, values, torch.cat([cached, segments.visible(self.window)], dim=2))
        y = self._output(o, x_BTD)
        if not return_state:
            return MixerOutput(y, None, {})
        if state is None:
            state = self.init_state(x_BTD.shape[0], x_BTD.shape[1], x_BTD.device, k.dtype)
        return MixerOutput(y, self._append(state, k, v, positions, segments), {})

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        x_B1D, position_B1 = x_BD[:, None], state["position"][:, None]
        q, k, v = self._project(x_B1D, position_B1)
        one = Segments.whole_rows(x_BD.shape[0], 1, x_BD.device, continued=True)
        state = self._append(state, k, v, position_B1, one)
        visible = self._cache_visible(state, position_B1, one)
        return self._output(attend(q, state["k"].to(q.dtype), state["v"].to(q.dtype), visible), x_B1D)[:, 0], state

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        slots = min(max_context, self.window or max_context)
        cache = torch.zeros(batch, slots, self.num_kv_heads, self.head_dim, device=device, dtype=dtype)
        return {"k": cache, "v": cache.clone(), "position": torch.zeros(batch, device=device, dtype=torch.int64)}

    def state_bytes(self, context: int) -> int:
        return 2 * 2 * self.num_kv_heads * self.head_dim * min(context, self.window or context)

    def state_elements(self) -> int:
        return 0

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        matrices = sum(m.weight.numel() for m in self.children() if isinstance(m, nn.Linear))
        pairs = (sum_len_squared + tokens) // 2  # a token sees itself and what came before
        if self.window is not None:
            pairs = min(pairs, tokens * self.window)
        return 2 * tokens * matrices + 4 * pairs * self.num_heads * self.head_dim

    def reset_parameters(self, std: float) -> None:
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def _project(self, x_BTD: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, K] and k, v [B, T, HKV, K], normalised and rotated."""
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim))  # noqa: E731
        q, k, v = heads(self.q_proj(x_BTD)), heads(self.k_proj(x_BTD)), heads(self.v_proj(x_BTD))
        q, k = self.q_norm(widen(q)).to(v.dtype), self.k_norm(widen(k)).to(v.dtype)
        if self.rope_theta is not None:
            q, k = rotate(q, positions_BT, self.rope_theta), rotate(k, positions_BT, self.rope_theta)
        return q, k, v

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

    def _append(self, state: MixerState, k: Tensor, v: Tensor, positions_BT: Tensor, segments: Segments) -> MixerState:
        """The cache with the newest tokens of each row's last document written to their slots."""
        slots, last = state["k"].shape[1], positions_BT[:, -1:]
        kept = (segments.row_start == segments.row_start[:, -1:]) & (positions_BT > last - slots)
        slot_BT = torch.where(kept, positions_BT % slots, slots)  # what is not kept goes to a slot that is cut off
        write = lambda cache, new: _scatter_tokens(cache, slot_BT, new)  # noqa: E731
        return {"k": write(state["k"], k), "v": write(state["v"], v), "position": last[:, 0] + 1}


def _scatter_tokens(cache: Tensor, slot_BT: Tensor, new: Tensor) -> Tensor:
    """cache [B, S, H, K] with new [B, T, H, K] at slots [B, T]; slot S is dropped."""
    padded = torch.cat([cache, cache[:, :1]], dim=1)
    index = slot_BT[..., None, None].expand_as(new)
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
