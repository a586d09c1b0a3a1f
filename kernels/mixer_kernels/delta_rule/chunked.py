"""The delta rule chunk by chunk in plain torch: what CPUs run, and the readable map of the Triton kernels.

In a chunk of C rows with incoming state S, writing vis_rs for "r sees s" and <a, b>_rs for
sum_c a_rc b_sc exp(sum of g_c over s < i <= r),

    P = scale * vis <q, k>        T = strictvis <e, k>        A = (I + T)^-1
    R = A (z - e~ S)              o = q~ S + P R              S' = gamma S + k~^T R

where q~, e~ and k~ carry the decay between a row and the chunk's edge, and are zero for rows that do not see the
incoming state (q~, e~) or are not seen by the outgoing one (k~). The form of Yang et al. 2024 (Parallelizing linear
transformers with the delta rule over sequence length), with the gates of Gated DeltaNet and of Kimi Linear.

Sums of g are only ever sums: nothing is subtracted, so that exp never sees a positive number, -inf is a lawful decay,
and autograd's gradient of g does not cancel either. Inside: [B, HV, N, C, K or V].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mixer_kernels.common.chunks import ChunkMasks, chunk_masks, from_chunks, to_chunks
from mixer_kernels.delta_rule.reference import erase_and_value, to_value_heads

CHUNK = 64


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    *,
    row_start: Tensor,
    initial_state: Tensor,
    scale: float,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """Same arguments, shapes and results as `reference`; time linear in T."""
    dtype, out_dtype, tokens = initial_state.dtype, v.dtype, q.shape[1]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    q, k = (to_value_heads(x, v.shape[2]) for x in (q, k))
    e, z = erase_and_value(k, v, beta, e)
    q, row_start = in_micro_steps(q, row_start, stride)
    q, k, e, z, g = (None if x is None else to_chunks(x, CHUNK) for x in (scale * q, k, e, z, g))
    A, P, *decayed = prepare(q, k, e, g, chunk_masks(row_start, CHUNK))
    o, state = scan(rounded(A, out_dtype), rounded(P, out_dtype), *decayed, z, initial_state, out_dtype)
    return from_chunks(o, tokens * stride)[:, stride - 1 :: stride].to(out_dtype), state


def in_micro_steps(q: Tensor, row_start: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """q [B, T, H, K] and row_start [B, T] of tokens as those of their micro-steps, of which the last alone reads."""
    if stride == 1:
        return q, row_start
    q = F.pad(q[:, :, None], (0, 0, 0, 0, stride - 1, 0)).flatten(1, 2)
    return q, torch.where(row_start < 0, row_start, row_start * stride).repeat_interleave(stride, dim=1)


def prepare(
    q: Tensor, k: Tensor, e: Tensor, g: Tensor | None, masks: ChunkMasks
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that does not depend on the state: A, P, q~, e~, k~, gamma. Documents and gates end here."""
    if g is None:
        qk, ek = q @ k.mT, e @ k.mT
        into, tail = masks.reads.to(q.dtype), masks.writes.to(q.dtype)
    else:
        products = scalar_pairs if g.shape[-1] == 1 else channel_pairs
        qk, ek, before, after = products(q, k, e, g)
        into, tail = torch.where(masks.reads, before.exp(), 0.0), torch.where(masks.writes, after.exp(), 0.0)
    P = torch.where(masks.sees, qk, 0.0)
    A = inverse(torch.where(masks.sees, ek, 0.0).tril(-1))
    return A, P, into * q, into * e, tail * k, into[..., -1, :, None]


def scalar_pairs(q: Tensor, k: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """<q, k> and <e, k> [.., C, C] under a decay per head, g [.., C, 1]; the sums of g up to a row and after it."""
    C = g.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)
    between = torch.where(later, g, 0.0).cumsum(-2)  # [.., r, s]: the sum over s < i <= r
    decay = torch.where(later.mT, -torch.inf, between).exp()
    return (q @ k.mT) * decay, (e @ k.mT) * decay, g.cumsum(-2), between[..., -1, :, None]


def channel_pairs(q: Tensor, k: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same under a decay per channel, g [.., C, K]: blocks of h rows are joined two by two, h = 1, 2, 4, ...

    Between row s of a block and row r of the next, the decay is the product of what follows s in its block and of
    what leads up to r in its own: both factors are at most 1, whatever g is, so that all pairs of two blocks are one
    matrix product.
    """
    before, after = g.unsqueeze(-2), torch.zeros_like(g).unsqueeze(-2)  # [.., C / h, h, K]
    qk, ek = ((x * k).sum(-1)[..., None, None] for x in (q, e))  # [.., C / h, h, h]
    while (h := before.shape[-2]) < g.shape[-2]:
        (lead, lead_2), (trail, trail_2) = pairwise(before), pairwise(after)
        k_1, q_2, e_2 = (x.unflatten(-2, (-1, 2, h))[..., i, :, :] for x, i in ((k, 0), (q, 1), (e, 1)))
        k_1, up_to_row = (k_1 * trail.exp()).mT, lead_2.exp()
        qk, ek = join(qk, (q_2 * up_to_row) @ k_1), join(ek, (e_2 * up_to_row) @ k_1)
        before = torch.cat([lead, lead_2 + lead[..., -1:, :]], -2)
        after = torch.cat([trail + lead_2[..., -1:, :], trail_2], -2)
    return qk[..., 0, :, :], ek[..., 0, :, :], before[..., 0, :, :], after[..., 0, :, :]


def pairwise(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[.., 2n, h, J] -> the first and the second of each two blocks, [.., n, h, J]."""
    return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]


def join(blocks: Tensor, cross: Tensor) -> Tensor:
    """Diagonal blocks [.., 2n, h, h] and those below them [.., n, h, h] -> [.., n, 2h, 2h], lower triangular."""
    first, second = pairwise(blocks)
    return torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)


def inverse(T: Tensor) -> Tensor:
    """(I + T)^-1 of strictly lower triangular T [.., C, C], by forward substitution.

    Never by powers of T: for correlated keys they reach 1e16 while the inverse stays of order 1.
    """
    identity = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    return torch.linalg.solve_triangular(T + identity, identity.expand_as(T), upper=False, unitriangular=True)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it is as an operand of the kernels' products: rounded to the inputs' dtype, summed up in fp32 or better."""
    return x.to(dtype).to(x.dtype)


def scan(
    A: Tensor,
    P: Tensor,
    q: Tensor,
    e: Tensor,
    k: Tensor,
    gamma: Tensor,
    z: Tensor,
    state: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The serial part, from what `prepare` returns: outputs [B, HV, N, C, V] and the last state."""
    states, residuals = [], []
    # unbind, not indexing: its gradient is one stack instead of a full-size tensor for each chunk
    for A_n, e_n, k_n, gamma_n, z_n in zip(*(x.unbind(2) for x in (A, e, k, gamma, z)), strict=True):
        states.append(rounded(state, dtype))
        residuals.append(rounded(A_n @ rounded(z_n - e_n @ states[-1], dtype), dtype))
        state = gamma_n * state + k_n.mT @ residuals[-1]
    return q @ torch.stack(states, 2) + P @ torch.stack(residuals, 2), state
