"""Room in a decoder's state for tokens to come."""

from __future__ import annotations

import torch
from torch import Tensor

from llm.mixers.base import MixerState
from llm.model.decoder import Decoder


def with_room(decoder: Decoder, state: list[MixerState], max_context: int) -> list[MixerState]:
    """The same state, able to go on to `max_context` tokens of a document in all.

    States of constant size come back as they are. A cache that grows with the context is padded with zeros, as the
    contract of `init_state` allows; it must not have been filled beyond the context that it was made for.
    """
    return [
        _grown(old, layer.mixer.init_state(_batch(old), max_context, "meta", torch.float32))
        for layer, old in zip(decoder.layers, state, strict=True)
    ]


def _batch(state: MixerState) -> int:
    return next(iter(state.values())).shape[0]


def _grown(state: MixerState, roomy: MixerState) -> MixerState:
    return {name: _padded(tensor, roomy[name].shape) for name, tensor in state.items()}


def _padded(x: Tensor, shape: torch.Size) -> Tensor:
    """x with zeros at the end of each axis that is shorter than `shape` has it."""
    missing = [max(0, wanted - got) for got, wanted in zip(x.shape, shape, strict=True)]
    if not any(missing):
        return x
    return torch.nn.functional.pad(x, [n for m in reversed(missing) for n in (0, m)])
