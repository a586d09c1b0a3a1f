"""Mixture of memories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState
from llm.mixers.gdn import GatedDeltaNet
from llm.mixers.walk import OneToken, Rows
from llm.model.precision import widen
from mixer_kernels.delta_rule import delta_rule, delta_rule_step
from mixer_kernels.segments import Segments


class MixtureOfMemories(GatedDeltaNet):
    """``o_t = sum_{m in top(x_t)} p_tm S_tm^T q_t``: Gated DeltaNet with several states, of which a token uses few.

    Du et al. 2025, arXiv 2502.13685. p is the softmax of x W_r over `memories`, scaled to sum 1 over the `top` largest.
    The memories that a token is not sent to neither decay nor change. `balance` times memories x sum_m (share of tokens
    sent to m) (mean p of m) is an auxiliary loss, least where all are used alike.

    Reduction: a row's tokens are sorted by memory, and each memory's part of each document is a document to the delta
    rule: `top` times the tokens, whatever the number of memories. Where a state is taken or given, memories are heads
    instead, with beta and g zero for the tokens of others; a step touches the chosen states alone.

    Not as in the paper: keys, values and gates are projected once for all memories (its code's `single_kv_proj`), and
    there is no memory that all tokens share.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        memories: int = 4,
        top: int = 2,
        balance: float = 0.01,
        **settings: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, **settings)
        if not 1 <= top <= memories:
            raise ValueError(f"top={top}: must be between 1 and memories={memories}")
        if balance < 0:
            raise ValueError(f"balance={balance}: must not be negative, or memories that nobody uses are rewarded")
        self.memories, self.top, self.balance = memories, top, balance
        self.router = nn.Linear(d_model, memories, bias=False)

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        walk = Rows(segments, state, self.watch)
        operands = self.operands(x_BTD, *self.project(x_BTD, walk))
        weights, chosen, loss = self._route(x_BTD)
        if state is None and not return_state:
            o = self._sorted(operands, weights, chosen, segments)
        else:
            o = self._by_heads(operands, weights, chosen, walk)
        y = self._routed(self.readout(o, x_BTD), walk)
        return MixerOutput(y, walk.new_state if return_state else None, {"balance_loss": loss})

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        walk = OneToken(state)
        operands = self.operands(x_BD, *self.project(x_BD, walk))
        weights, chosen, _ = self._route(x_BD)  # [B, n]
        memories = state["recurrent"].unflatten(1, (self.memories, -1))  # [B, M, H, K, V]
        index = chosen[..., None, None, None].expand(-1, -1, *memories.shape[2:])
        tiled = {name: _tiled(y, self.top, 1) for name, y in operands.items()}
        o, new = delta_rule_step(**tiled, state=memories.gather(1, index).flatten(1, 2), impl=self.impl)
        memories = memories.scatter(1, index, new.unflatten(1, (self.top, -1)))
        walk.new_state["recurrent"] = memories.flatten(1, 2)
        o = (weights[..., None, None] * widen(o).unflatten(1, (self.top, -1))).sum(1).to(o.dtype)
        return self._routed(self.readout(o, x_BD), walk), walk.new_state

    def wide_state(self) -> dict[str, tuple[int, ...]]:
        heads, *sizes = super().wide_state()["recurrent"]
        return super().wide_state() | {"recurrent": (self.memories * heads, *sizes)}

    def products(self) -> int:
        return super().products() * self.top // self.memories

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and indices [.., n] of the memories of each token, and the auxiliary loss."""
        share = widen(self.router(x)).softmax(-1)
        largest, chosen = share.topk(self.top, dim=-1)
        used = torch.zeros_like(share).scatter(-1, chosen, 1.0).flatten(0, -2).mean(0) / self.top
        loss = self.balance * self.memories * (used * share.flatten(0, -2).mean(0)).sum()
        return largest / largest.sum(-1, keepdim=True), chosen, loss

    def _sorted(self, operands: dict[str, Tensor], weights: Tensor, chosen: Tensor, segments: Segments) -> Tensor:
        """o [B, T, H, V]: every token once for each of its memories, [B, T n], in the order of memories and of time."""
        tokens, memory = chosen.shape[1], chosen.flatten(1)  # [B, T n]
        time = torch.arange(tokens, device=chosen.device).repeat_interleave(self.top)
        order = (memory * tokens + time).argsort(1)
        token, row = order // self.top, torch.arange(len(order), device=order.device)[:, None]
        pick = lambda y: y[row, token]  # noqa: E731  [B, T, ...] -> [B, T n, ...]
        memory, document = memory.gather(1, order), pick(segments.row_start)
        is_start = (memory != memory.roll(1, 1)) | (document != document.roll(1, 1))
        is_start[:, 0] = True
        ordered = {name: pick(y) for name, y in operands.items()}
        o, _ = delta_rule(**ordered, segments=Segments.from_starts(is_start), impl=self.impl)
        back = order.argsort(1)[..., None, None].expand_as(o)
        o = o.gather(1, back).unflatten(1, (tokens, self.top))  # [B, T, n, H, V]
        return (weights[..., None, None] * widen(o)).sum(2).to(o.dtype)

    def _by_heads(self, operands: dict[str, Tensor], weights: Tensor, chosen: Tensor, walk: Rows) -> Tensor:
        """o [B, T, H, V] with a state: every memory sees every token, most of which change nothing in it."""
        weight_BTM = weights.new_zeros(*chosen.shape[:2], self.memories).scatter(-1, chosen, weights)
        member = (weight_BTM > 0).repeat_interleave(self.num_heads, dim=2)  # [B, T, M H]
        tiled = {name: _tiled(y, self.memories, 2) for name, y in operands.items()}
        gates = {name: torch.where(member, tiled[name], 0.0) for name in ("g", "beta")}
        o = self.recur(walk, tiled | gates).unflatten(2, (self.memories, -1))  # [B, T, M, H, V]
        return (weight_BTM[..., None, None] * widen(o)).sum(2).to(o.dtype)


def _tiled(x: Tensor, times: int, axis: int) -> Tensor:
    """The heads, along `axis`, once for each memory."""
    return torch.cat([x] * times, dim=axis)
