"""What the trainer receives from the data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mixer_kernels.segments import Segments, cumulative_lengths

IGNORED = -100  # target of a token whose prediction is not counted
TENSORS = ("tokens", "targets", "row_start")


@dataclass
class Batch:
    """Packed rows of tokens with their document boundaries.

    tokens    int64 [B, T]   inputs
    targets   int64 [B, T]   the token that follows, IGNORED where that token belongs to another document or to padding
    row_start int32 [B, T]   see `mixer_kernels.Segments`
    state     the position of the data after this batch: plain JSON data, the same on every rank
    whole     every row is one document (but for padding at its end), whatever the batch: a property of the data
    cu_seqlens  see `mixer_kernels.Segments`; made where a batch goes to a GPU
    """

    tokens: Tensor
    targets: Tensor
    row_start: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    cu_seqlens: Tensor | None = None

    @property
    def segments(self) -> Segments:
        """The document boundaries in the form that the model takes."""
        return Segments(self.row_start, self.cu_seqlens, self.whole)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`. The host does not wait for the copy."""
        if torch.device(device).type != "cuda":
            return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})
        tensors = {name: getattr(self, name) for name in TENSORS}
        if self.cu_seqlens is None and not self.row_start.is_cuda:
            tensors["cu_seqlens"] = cumulative_lengths(self.row_start)
        moved = {name: x.pin_memory().to(device, non_blocking=True) for name, x in tensors.items() if not x.is_cuda}
        if "cu_seqlens" in moved:  # one graph, however many documents there are
            torch._dynamo.maybe_mark_dynamic(moved["cu_seqlens"], 0)
        return replace(self, **moved)
