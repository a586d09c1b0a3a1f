"""Softmax and linear heads in one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llm.mixers.base import MixerOutput, MixerState, TokenMixer
from llm.mixers.gdn import GatedDeltaNet
from llm.mixers.softmax import SoftmaxAttention
from llm.model.precision import widen
from mixer_kernels.segments import Segments


class NormedHeads(SoftmaxAttention):
    """Softmax attention whose heads' outputs are RMS-normalised, as those of linear heads are."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, norm_eps: float, **settings: Any) -> None:
        super().__init__(d_model, layer_idx, n_layers, norm_eps=norm_eps, **settings)
        self.o_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)

    def _output(self, o_BTHK: Tensor, x_BTD: Tensor) -> Tensor:
        return super()._output(self.o_norm(widen(o_BTHK)).to(o_BTHK.dtype), x_BTD)


class HydraHead(TokenMixer):
    """``y = W_o [norm(softmax heads); norm(Gated DeltaNet heads)]``: a hybrid along the axis of heads.

    Tan et al. 2026, arXiv 2606.20097: few heads that see everything, beside many with a state; each head's output is
    normalised with a learned scale before all are projected together (which is the sum of two projections). `full` and
    `linear` are the settings of `SoftmaxAttention` and of `GatedDeltaNet`.

    Inferred: both kinds project from the input for themselves. The paper turns heads of a trained model into linear
    ones and picks them by their effect; trained from the start, any head may become any.
    """

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        full: Mapping[str, Any],
        linear: Mapping[str, Any],
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.full = NormedHeads(d_model, layer_idx, n_layers, norm_eps=norm_eps, **full)
        self.linear = GatedDeltaNet(d_model, layer_idx, n_layers, norm_eps=norm_eps, **linear)

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        parts = {
            name: part(x_BTD, segments, None if state is None else _own(state, name), return_state=return_state)
            for name, part in self.named_children()
        }
        new = _joined({name: out.state for name, out in parts.items()}) if return_state else None
        return MixerOutput(parts["full"].y + parts["linear"].y, new, {})

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        parts = {name: part.step(x_BD, _own(state, name)) for name, part in self.named_children()}
        return parts["full"][0] + parts["linear"][0], _joined({name: new for name, (_, new) in parts.items()})

    def route_values(self) -> None:
        self.full.route_values()
        self.linear.route_values()

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        return _joined({n: part.init_state(batch, max_context, device, dtype) for n, part in self.named_children()})

    def state_bytes(self, context: int) -> int:
        return self.full.state_bytes(context) + self.linear.state_bytes(context)

    def state_elements(self) -> int:
        return self.linear.state_elements()

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        return self.full.flops(tokens, sum_len_squared) + self.linear.flops(tokens, sum_len_squared)

    def reset_parameters(self, std: float) -> None:
        self.full.reset_parameters(std)
        self.linear.reset_parameters(std)


def _own(state: MixerState, part: str) -> MixerState:
    """The entries of one part, under their own names."""
    return {name.removeprefix(f"{part}."): x for name, x in state.items() if name.startswith(f"{part}.")}


def _joined(states: dict[str, MixerState]) -> MixerState:
    return {f"{part}.{name}": x for part, state in states.items() for name, x in state.items()}
