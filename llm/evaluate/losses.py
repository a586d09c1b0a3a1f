"""The loss of every token, at any length: in chunks with carried state, in smaller ones where memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.data import IGNORED, Batch
from llm.model.decoder import Decoder
from llm.model.room import with_room
from mixer_kernels.segments import Segments

LOGIT_BYTES = 256 * 2**20  # of the logits that exist at the same time, in fp32
SMALLEST_CHUNK = 64


@dataclass
class Fit:
    """How much goes through the model at a time: `rows` rows, `chunk` tokens of each. It shrinks to fit the memory."""

    rows: int
    chunk: int

    def run(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` returns, tried again with less at a time while memory runs out; None where nothing helps."""
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()  # nothing where there is no GPU
            if self.rows > 1:
                self.rows //= 2
            elif self.chunk > SMALLEST_CHUNK:
                self.chunk //= 2
            else:
                return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Is it a GPU's or the host's allocator that failed?"""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@torch.inference_mode()
def token_losses(model: Decoder, batch: Batch, *, chunk: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each target in nats, fp32 [B, T], 0 where it is not counted, and whether it is the likeliest.

    Rows longer than `chunk` tokens go through the model in parts, each from the state that the one before left, so that
    memory grows with what the mixers keep, not with the length.
    """
    length, state = batch.tokens.shape[1], None
    losses = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    right = torch.zeros_like(losses, dtype=torch.bool)
    for start in range(0, length, chunk):
        part = slice(start, min(start + chunk, length))
        more = part.stop < length
        segments = batch.segments if chunk >= length else Segments((batch.row_start[:, part] - start).clamp(min=-1))
        out = model(batch.tokens[:, part], segments, state, return_state=more)
        state = with_room(model, out.state, length) if more else None
        losses[:, part], right[:, part] = _compare(model, out.hidden, batch.targets[:, part])
    return losses, right


def _compare(model: Decoder, hidden_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and rightness of each target, from some tokens' logits at a time."""
    step = max(1, LOGIT_BYTES // (4 * model.padded_vocab_size))
    hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
    losses, right = [], []
    for hidden, targets in zip(hidden_ND.split(step), targets_N.split(step), strict=True):
        logits = model.logits(hidden)
        losses.append(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none"))
        right.append(logits.argmax(dim=1) == targets)
    return torch.cat(losses).view_as(targets_BT), torch.cat(right).view_as(targets_BT)
