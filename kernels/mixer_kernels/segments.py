"""Document boundaries of a batch of packed rows, as one static tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Where the documents of a batch of rows begin.

    `row_start` int32 [B, T] holds, for each token, the index in its row of the first token of that token's document;
    -1 where the document began before the row, so that it continues from the initial state. Token s is visible to
    token r iff ``row_start[r] <= s <= r``.

    A tuple of tensors: it passes through `torch.compile`, pytrees and custom operators, needs no lengths on the host,
    and any number of documents costs the same. The other two fields say the same in forms that softmax attention's
    kernels want; without them it goes by `row_start`.

    cu_seqlens int32 [documents + 1]: where each document, or its part in a row, begins in the rows laid end to end,
    and the number of all tokens behind them (`cumulative_lengths`).
    whole: every row is one document that begins with it (but for padding at its end).
    """

    row_start: Tensor
    cu_seqlens: Tensor | None = None
    whole: bool = False

    @classmethod
    def whole_rows(
        cls, batch: int, tokens: int, device: torch.device | str = "cpu", *, continued: bool = False
    ) -> Segments:
        """One document a row; with `continued` it began before the row."""
        row_start = torch.full((batch, tokens), -1 if continued else 0, dtype=torch.int32, device=device)
        return cls(row_start, whole=not continued)

    @classmethod
    def from_starts(cls, is_start_BT: Tensor) -> Segments:
        """From bool [B, T], true at the first token of a document. Tokens before a row's first start are continued."""
        index = torch.arange(is_start_BT.shape[1], device=is_start_BT.device, dtype=torch.int32)
        return cls(torch.where(is_start_BT, index, -1).cummax(dim=1).values.to(torch.int32))

    def positions(self, offset: Tensor | None = None) -> Tensor:
        """Position of each token in its document, int64 [B, T].

        `offset` int [B] is the number of tokens that continued documents had before the row (0 if absent).
        """
        index = torch.arange(self.row_start.shape[1], device=self.row_start.device)
        before = torch.zeros_like(index[:1]) if offset is None else offset[:, None].long()
        return torch.where(self.row_start < 0, index + before, index - self.row_start)

    def visible(self, window: int | None = None) -> Tensor:
        """bool [B, T, T]: may token r (dim 1) see token s (dim 2); at most the last `window` tokens if given."""
        index = torch.arange(self.row_start.shape[1], device=self.row_start.device)
        seen = (self.row_start[:, :, None] <= index) & (index <= index[:, None])
        if window is not None:
            seen = seen & (index > index[:, None] - window)
        return seen


def cumulative_lengths(row_start_BT: Tensor) -> Tensor:
    """`Segments.cu_seqlens` of a `row_start` on the CPU; on a GPU the host would wait for their number."""
    begins = row_start_BT == torch.arange(row_start_BT.shape[1], device=row_start_BT.device)
    begins[:, 0] = True  # what continues a document begins anew here: these lengths are for attention without a cache
    offsets = begins.flatten().nonzero().squeeze(1)
    return torch.cat([offsets, offsets.new_tensor([row_start_BT.numel()])]).int()
