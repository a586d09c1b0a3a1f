"""What a token mixer is. Nothing but the contract, and the legend of the shapes.

Shape suffixes, used all over the project:
    B batch (rows)          T tokens of a row            D model width
    H heads                 K, V key and value size of a head
    F MLP width             C chunk length               N chunks               W vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llm.errors import UserError
from mixer_kernels.segments import Segments

MixerState = dict[str, Tensor]


class MixerOutput(NamedTuple):
    """`y` [B, T, D]; `state` after the last token (None unless asked for); `aux` named auxiliary losses and values."""

    y: Tensor
    state: MixerState | None
    aux: dict[str, Tensor]


class TokenMixer(nn.Module):
    """Mixes information across the tokens of a document, causally.

    A mixer is built as ``Mixer(d_model, layer_idx, n_layers, **settings)``: the decoder supplies the first three, the
    mixer's yaml file the rest. It must hold that

    * packed == separate: tokens see their own document only, as `segments` has it;
    * forward == repeated `step`; ``forward(x, state=s)`` continues documents whose `row_start` is -1 from s;
    * nothing in `forward` branches on, or reads, a Python number that differs between layers, so that
      `torch.compile` compiles all layers once.
    """

    watch: Callable[[str, Tensor], None] | None = (
        None  # probes: told the name of a state and its log-decays in `forward`
    )

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.value_route: nn.Linear | None = None

    def forward(
        self, x_BTD: Tensor, segments: Segments, state: MixerState | None = None, *, return_state: bool = False
    ) -> MixerOutput:
        """Mix whole rows: x_BTD [B, T, D] -> y [B, T, D]."""
        raise NotImplementedError

    def step(self, x_BD: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        """Mix one more token of each row: x_BD [B, D] -> y [B, D] and the new state."""
        raise NotImplementedError

    def init_state(self, batch: int, max_context: int, device: torch.device | str, dtype: torch.dtype) -> MixerState:
        """The state before the first token: tensors with the batch first; `max_context` bounds a growing cache.

        A cache for fewer tokens, as long as they are not exceeded, is the beginning of one for more, along whichever
        axes grow: it is enlarged by padding with zeros (`llm/model/room.py`).
        """
        raise NotImplementedError

    def state_bytes(self, context: int) -> int:
        """Bytes of state that decoding one sequence holds after `context` tokens, at bf16 activations."""
        raise NotImplementedError

    def state_elements(self) -> int:
        """Elements of the recurrent matrices [H, K, V] of one sequence, which are constant; 0 for a cache that grows.

        A head's vectors beside its matrix are small; `state_bytes` counts them too.
        """
        raise NotImplementedError

    def route_values(self) -> None:
        """Add to the output, from now on, a projection of what is written into memory: `value_route`, zero at first."""
        raise UserError(
            f"residual=value_routing: {type(self).__name__} has no values to route. Choose another residual."
        )

    def flops(self, tokens: int, sum_len_squared: int) -> int:
        """Matrix-multiply FLOPs of one forward pass over documents of `tokens` tokens in all.

        `sum_len_squared` is the sum of the squared lengths of the documents. The recurrence is counted in its
        token-by-token form, so that the figure does not depend on an implementation's chunk length.
        """
        raise NotImplementedError

    def reset_parameters(self, std: float) -> None:
        """Initialise: matrices from N(0, std), the mixer's special parameters as its paper has them."""
        raise NotImplementedError
