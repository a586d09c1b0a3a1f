"""The chunkwise form in plain torch: matmuls over chunks of 64 rows and a scan over chunks.

What runs on CPUs, what the kernels can be read against, and in fp64 the oracle for long rows. As in the kernels,
operands of products are rounded to the inputs' dtype and products accumulate in fp32 (fp64 for fp64 inputs): the error
of this form is the yardstick for theirs. Gradients are torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixer_kernels.common.chunks import (
    ChunkMasks,
    chunk_masks,
    decayed_apply,
    decayed_scores,
    from_chunks,
    rounded,
    scan_states,
    to_chunks,
)

CHUNK = 64


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    exclusive: bool,
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K or 1], gv [B, T, HV, V] -> o in v's dtype, final state."""
    operand, dtype, tokens, groups = v.dtype, initial_state.dtype, v.shape[1], v.shape[2] // q.shape[2]
    q, k, v = (to_chunks(x.to(dtype), CHUNK) for x in (q, k, v))
    if groups > 1:
        q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
    G, Gv = (None if x is None else to_chunks(x, CHUNK).cumsum(dim=-2) for x in (g, gv))
    masks = chunk_masks(row_start, CHUNK, exclusive=exclusive)

    A = scale * _scores(q, k, G, masks, operand)
    inside = rounded(A, operand) @ v if Gv is None else decayed_apply(A, v, Gv, operand)
    k_left = rounded(_decay_to_end(k, G).masked_fill(~masks.writes, 0.0), operand)
    made = k_left.mT @ rounded(_decay_to_end(v, Gv), operand)
    entering, final = scan_states(_through(G, Gv, masks, dtype), made, initial_state)
    q_read = rounded(scale * _decay_from_start(q, G).masked_fill(~masks.reads, 0.0), operand)
    from_before = _decay_from_start(q_read @ rounded(entering, operand), Gv)
    return from_chunks(inside + from_before, tokens).to(operand), final


def _scores(q: Tensor, k: Tensor, G: Tensor | None, masks: ChunkMasks, operand: torch.dtype) -> Tensor:
    """What row r reads of row s's write: q[r] . k[s] under the decay between them, 0 where unseen. [B, H, N, C, C]."""
    if G is None:
        return (q @ k.mT).masked_fill(~masks.sees, 0.0)
    if G.shape[-1] > 1:
        return decayed_scores(q, k, G, operand).masked_fill(~masks.sees, 0.0)
    between = (G - G.mT).masked_fill(~masks.sees, -torch.inf)  # masked before exp: above the diagonal it would overflow
    return (q @ k.mT) * between.exp()


def _decay_from_start(x: Tensor, G: Tensor | None) -> Tensor:
    """x [..., C, J] under the decay from the chunk's start to each row."""
    return x if G is None else x * G.exp()


def _decay_to_end(x: Tensor, G: Tensor | None) -> Tensor:
    """x [..., C, J] under the decay from each row to the chunk's end."""
    return x if G is None else x * (G[..., -1:, :] - G).exp()


def _through(G: Tensor | None, Gv: Tensor | None, masks: ChunkMasks, dtype: torch.dtype) -> Tensor:
    """What a whole chunk leaves of the state entering it: [B, H or 1, N, K or 1, V or 1]."""
    through = masks.carry.to(dtype)
    if G is not None:
        through = through * G[..., -1, :, None].exp()
    return through if Gv is None else through * Gv[..., -1, None, :].exp()
