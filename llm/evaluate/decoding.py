"""How fast a model reads and writes, and what it has to keep, against the tokens before."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from llm.evaluate.losses import Fit
from llm.evaluate.results import NO_MEMORY
from llm.mixers.base import MixerState
from llm.model.decoder import Decoder
from llm.model.room import with_room

WARMUP = 3


def time_decoding(model: Decoder, context: int, *, batch: int, new_tokens: int, fit: Fit) -> dict[str, Any]:
    """Tokens a second of reading `context` random tokens in each of `batch` rows, and of writing `new_tokens` after.

    With the bytes of state a row by the mixers' own reckoning and as measured. Eager, one process.
    """
    cell = {"context": context, "batch": batch, "state_bytes": model.state_bytes(context)}
    fit = Fit(1, fit.chunk)  # rows are given: only the chunk may shrink
    measured = fit.run(lambda: _measure(model, context, batch, new_tokens, fit.chunk))
    return {**cell, **(measured or {"skipped": NO_MEMORY})}


def store_matrices(model: Decoder, dtype: torch.dtype) -> None:
    """Keep the matrices of `model` in `dtype`; norms and gates stay as they are."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.to(dtype)


@torch.inference_mode()
def _measure(model: Decoder, context: int, batch: int, new_tokens: int, chunk: int) -> dict[str, float]:
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(model.vocab_size, (batch, context), generator=generator).to(device)
    _read(model, tokens_BT[:, : min(chunk, context)], chunk, new_tokens)  # kernels are compiled and chosen
    began = _now(device)
    state = _read(model, tokens_BT, chunk, WARMUP + new_tokens)
    read = _now(device) - began
    kept = sum(x.numel() * x.element_size() for layer in state for x in layer.values())
    token_B = tokens_BT[:, -1]
    for i in range(WARMUP + new_tokens):
        if i == WARMUP:
            began = _now(device)
        logits_BW, state = model.step(token_B, state)
        token_B = logits_BW.argmax(dim=-1)
    written = _now(device) - began
    return {
        "state_bytes_measured": kept / batch,
        "prefill_tokens_per_second": batch * context / read,
        "tokens_per_second": batch * new_tokens / written,
        "milliseconds_a_token": 1e3 * written / new_tokens,
    }


def _read(model: Decoder, tokens_BT: torch.Tensor, chunk: int, room: int) -> list[MixerState]:
    """The state after the tokens, with room for `room` more."""
    state = None
    for part in tokens_BT.split(chunk, dim=1):
        _, state, _ = model(part, None, state, return_state=True)
        state = with_room(model, state, tokens_BT.shape[1] + room)
    return state


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
