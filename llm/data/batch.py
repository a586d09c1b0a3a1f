"""What the trainer receives from the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mixer_kernels.segments import Segments

IGNORED = -100  # target of a token whose prediction is not counted


@dataclass
class Batch:
    """Packed rows of tokens with their document boundaries.

    tokens    int64 [B, T]   inputs
    targets   int64 [B, T]   the token that follows, IGNORED where that token belongs to another document or to padding
    row_start int32 [B, T]   see `mixer_kernels.Segments`
    state     the position of the data after this batch: plain JSON data, the same on every rank
    """

    tokens: Tensor
    targets: Tensor
    row_start: Tensor
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def segments(self) -> Segments:
        """The document boundaries in the form that the model takes."""
        return Segments(self.row_start)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        move = lambda x: x.to(device, non_blocking=True)  # noqa: E731
        return Batch(move(self.tokens), move(self.targets), move(self.row_start), self.state)
