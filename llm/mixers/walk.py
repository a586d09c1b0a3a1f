"""How a mixer goes over tokens: whole rows, or one token after a state. Written against both, a mixer is written once.

What looks back in time (operators, convolutions, running sums, positions) is asked of a `Walk`, under the name of its
entry in the state. All else in a mixer treats each token for itself, with shapes [B, T, ...] over rows and [B, ...]
for one token: anything that acts on trailing axes. So `forward` and `step` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llm.mixers.base import MixerState
from llm.model.precision import widen
from llm.model.shortconv import ShortConvolution
from mixer_kernels.delta_rule import delta_rule, delta_rule_step
from mixer_kernels.linear_attention import linear_attention, linear_attention_step
from mixer_kernels.segments import Segments

Operator = Callable[..., tuple[Tensor, Tensor]]
Watch = Callable[[str, Tensor], None]
MICRO_STEPPED = ("k", "v", "g", "beta", "e")


class Walk:
    """`state` before the tokens (without entries: zeros), and `new_state` after them, filled as the mixer asks."""

    def __init__(self, state: MixerState) -> None:
        self.state: MixerState = state
        self.new_state: MixerState = {}
        self.written: Tensor | None = None  # the values that the mixer writes, [.., H V]

    def recur(self, name: str, operator: Operator, step: Operator, **operands: Any) -> Tensor:
        """An operator of `mixer_kernels` (and its step) with the state `name` [B, HV, K, V]: o [.., HV, V].

        Where tokens have n micro-steps (`stride` of the delta rule), all operands but q have them as an axis before the
        heads: k [.., n, H, K].
        """
        raise NotImplementedError

    def linear_attention(self, name: str, **operands: Any) -> Tensor:
        """`mixer_kernels.linear_attention` with the state `name`."""
        return self.recur(name, linear_attention, linear_attention_step, **operands)

    def delta_rule(self, name: str, **operands: Any) -> Tensor:
        """`mixer_kernels.delta_rule` with the state `name`."""
        return self.recur(name, delta_rule, delta_rule_step, **operands)

    def convolve(self, name: str, convolution: ShortConvolution, x: Tensor) -> Tensor:
        """x [.., D] convolved with what came before it."""
        raise NotImplementedError

    def previous(self, name: str, x: Tensor) -> Tensor:
        """The x [.., D] of the token before; zeros at the beginning of a document."""
        raise NotImplementedError

    def running_sum(self, name: str, x: Tensor) -> Tensor:
        """The sum of x over the document up to and with each token, in at least fp32; any trailing shape."""
        raise NotImplementedError

    def positions(self, name: str = "position") -> Tensor:
        """The position of each token in its document, int64 [..]."""
        raise NotImplementedError


class Rows(Walk):
    """Over whole rows of packed documents: tensors are [B, T, ...]. `watch` as in `TokenMixer`."""

    def __init__(self, segments: Segments, state: MixerState | None, watch: Watch | None = None) -> None:
        super().__init__(state or {})
        self.segments, self.watch = segments, watch

    def recur(self, name: str, operator: Operator, step: Operator, **operands: Any) -> Tensor:
        if self.watch is not None:
            for log_decay in filter(torch.is_tensor, (operands.get("g"), operands.get("gv"))):
                self.watch(name, log_decay)
        if _micro_stepped(operands):  # [B, T, n, ...] -> [B, T n, ...]
            stride = operands["k"].shape[2]
            operands |= {key: operands[key].flatten(1, 2) for key in MICRO_STEPPED if key in operands}
            operands["stride"] = stride
        o, self.new_state[name] = operator(**operands, segments=self.segments, initial_state=self.state.get(name))
        return o

    def convolve(self, name: str, convolution: ShortConvolution, x: Tensor) -> Tensor:
        y, self.new_state[name] = convolution(x, self.segments, self.state.get(name))
        return y

    def previous(self, name: str, x: Tensor) -> Tensor:
        self.new_state[name] = x[:, -1]
        before = self.state[name].to(x.dtype) if name in self.state else torch.zeros_like(x[:, 0])
        index = torch.arange(x.shape[1], device=x.device)
        shifted = torch.cat([before[:, None], x[:, :-1]], dim=1)
        return torch.where((self.segments.row_start < index)[..., None], shifted, 0.0)

    def running_sum(self, name: str, x: Tensor) -> Tensor:
        wide = widen(x).flatten(2)  # [B, T, J]
        total, row_start = wide.cumsum(1), self.segments.row_start[..., None]
        before = torch.zeros_like(wide[:, 0]) if name not in self.state else self.state[name].flatten(1)
        first = row_start.clamp(min=0).long().expand_as(wide)
        past = (total - wide).gather(1, first)  # what earlier documents of the row summed up to
        summed = (total - torch.where(row_start < 0, -before[:, None], past)).view_as(x)
        self.new_state[name] = summed[:, -1]
        return summed

    def positions(self, name: str = "position") -> Tensor:
        found = self.segments.positions(self.state.get(name))
        self.new_state[name] = found[:, -1] + 1
        return found


class OneToken(Walk):
    """One more token of each row: tensors are [B, ...], and every entry of the state is there."""

    def recur(self, name: str, operator: Operator, step: Operator, **operands: Any) -> Tensor:
        if _micro_stepped(operands):  # [B, n, ...], without n where it is 1
            stride = operands["k"].shape[1]
            given = {key: operands[key] for key in MICRO_STEPPED if key in operands}
            operands |= given if stride > 1 else {key: x.squeeze(1) for key, x in given.items()}
            operands["stride"] = stride
        o, self.new_state[name] = step(**operands, state=self.state[name])
        return o

    def convolve(self, name: str, convolution: ShortConvolution, x: Tensor) -> Tensor:
        y, self.new_state[name] = convolution.step(x, self.state[name])
        return y

    def previous(self, name: str, x: Tensor) -> Tensor:
        self.new_state[name] = x
        return self.state[name].to(x.dtype)

    def running_sum(self, name: str, x: Tensor) -> Tensor:
        self.new_state[name] = self.state[name] + widen(x)
        return self.new_state[name]

    def positions(self, name: str = "position") -> Tensor:
        self.new_state[name] = self.state[name] + 1
        return self.state[name]


def _micro_stepped(operands: dict[str, Any]) -> bool:
    return operands["k"].ndim > operands["q"].ndim
