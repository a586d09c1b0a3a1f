"""Chunkwise forms in plain torch: the layout of chunks, who sees whom in them, and products under a decay.

Everywhere G is the cumulative sum of log-decays from the start of a chunk, so that exp(G[r] - G[s]) is the decay
between rows s <= r. It is only ever formed with exponents <= 0: nothing overflows, however strong the decay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_chunks(x: Tensor, chunk: int, value: float = 0.0) -> Tensor:
    """[B, T, H, J] -> [B, H, N, C, J], padded with `value` to whole chunks."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk), value=value).unflatten(1, (-1, chunk))
    return x.permute(0, 3, 1, 2, 4).contiguous()


def from_chunks(x: Tensor, tokens: int) -> Tensor:
    """[B, H, N, C, J] -> [B, T, H, J], the padding cut off."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]


class ChunkMasks(NamedTuple):
    """What document boundaries allow. Rows r, s of chunk n; all bool, and they broadcast over heads.

    sees [B, 1, N, C, C]: r reads what s wrote; reads [B, 1, N, C, 1]: r reads the state that enters the chunk;
    writes [B, 1, N, C, 1]: what s wrote is part of the state that leaves it; carry [B, 1, N, 1, 1]: so is what entered.
    """

    sees: Tensor
    reads: Tensor
    writes: Tensor
    carry: Tensor


def chunk_masks(row_start: Tensor, chunk: int, *, exclusive: bool = False) -> ChunkMasks:
    """Masks from row_start int [B, T]; `exclusive`: a row does not see its own write."""
    batch, tokens = row_start.shape
    # Padding prolongs the last document, so that the last chunk's outgoing state is the state after the last token.
    start = torch.cat([row_start, row_start[:, -1:].expand(batch, -tokens % chunk)], dim=1)
    start = start.view(batch, 1, -1, chunk)
    row = torch.arange(start.shape[2] * chunk, device=start.device).view(-1, chunk)
    first, last_start = row[:, :1], start[..., -1:]
    return ChunkMasks(
        sees=(start[..., None] <= row[:, None, :]) & (row[:, None, :] <= row[:, :, None] - int(exclusive)),
        reads=(start < first)[..., None],
        writes=(last_start <= row)[..., None],
        carry=(last_start < first)[..., None],
    )


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """[..., C, J] -> the earlier and the later half of each block of 2 * half rows, each [..., C / 2half, half, J]."""
    pairs = x.unflatten(-2, (-1, 2, half))
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _factors(G: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """exp(G[r] - G[s]) as a product for s in the earlier, r in the later half: each factor is <= 1 (s first)."""
    earlier, later = _halves(G, half)
    corner = earlier[..., -1:, :]
    return (corner - earlier).exp(), (later - corner).exp()


def _levels(chunk: int) -> list[int]:
    """Half lengths of the blocks, small to large; a chunk is a power of two rows."""
    return [1 << i for i in range(chunk.bit_length() - 1)]


def rounded(x: Tensor, operand: torch.dtype) -> Tensor:
    """x rounded to the dtype that a matrix unit would read; the product itself still accumulates in x's dtype."""
    return x.to(operand).to(x.dtype)


def decayed_scores(x: Tensor, y: Tensor, G: Tensor, operand: torch.dtype) -> Tensor:
    """A[r, s] = sum_c x[r, c] y[s, c] exp(G[r, c] - G[s, c]) for s <= r, else 0: [..., C, J] -> [..., C, C].

    By halving: rows of the later half against those of the earlier half are one product, whose reference is the gate
    at the corner between them; the two halves are problems of the same kind. Operands are rounded to `operand`.
    """
    blocks = (x * y).sum(-1)[..., None, None]  # [..., C, 1, 1]: the diagonal
    for half in _levels(x.shape[-2]):
        by_col, by_row = _factors(G, half)
        rows, columns = _halves(x, half)[1] * by_row, _halves(y, half)[0] * by_col
        square = rounded(rows, operand) @ rounded(columns, operand).mT
        top, bottom = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        upper = torch.cat([top, torch.zeros_like(top)], dim=-1)
        blocks = torch.cat([upper, torch.cat([square, bottom], dim=-1)], dim=-2)
    return blocks.squeeze(-3)


def decayed_apply(A: Tensor, y: Tensor, G: Tensor, operand: torch.dtype) -> Tensor:
    """sum over s <= r of A[r, s] y[s, c] exp(G[r, c] - G[s, c]): A [..., C, C], y and G [..., C, J] -> [..., C, J]."""
    out = A.diagonal(dim1=-2, dim2=-1)[..., None] * y
    for half in _levels(y.shape[-2]):
        by_col, by_row = _factors(G, half)
        blocks = A.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # [..., m, 2, half, m, 2, half]
        square = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., m, half, half]
        later = by_row * (rounded(square, operand) @ rounded(_halves(y, half)[0] * by_col, operand))
        out = out + torch.stack([torch.zeros_like(later), later], dim=-3).flatten(-4, -2)
    return out


def scan_states(through: Tensor, made: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """S[n + 1] = through[n] * S[n] + made[n]: the states entering each chunk [B, H, N, K, V] and the last one.

    through [B, H, N, K or 1, V or 1], made [B, H, N, K, V], initial [B, H, K, V].
    """
    state, entering = initial, []
    # unbind, not indexing: its gradient is one stack instead of a full-size tensor for each chunk
    for decay, new in zip(through.unbind(2), made.unbind(2), strict=True):
        entering.append(state)
        state = decay * state + new
    return torch.stack(entering, dim=2), state
