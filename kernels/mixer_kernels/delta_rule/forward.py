"""Triton kernels of the forward pass: `prepare_*`, all chunks in parallel, then `scan`, chunk after chunk.

What they compute is in `chunked.py`, under the same names. The scan holds the state as its transpose [V, K], and all
that hangs on the state likewise: then each product of the chain state -> X -> R -> state has the last result as its
left operand, which the tensor cores take from registers. What only these kernels and those of the backward pass read
(states, R and their gradients) is stored in that layout too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows

NONE, SCALAR, CHANNEL = (tl.constexpr(i) for i in range(3))
INTO, TAIL, BETA = (tl.constexpr(i) for i in range(3))  # the three row vectors of a chunk, [B, HV, N, 3, C]
STRONGEST = tl.constexpr(-100.0)  # log decay of a step: exp is 0 from here on, and -inf - -inf would be NaN


@triton.jit
def locate(T, H: tl.constexpr, HV: tl.constexpr, N, index):
    """Chunk `index` of [B, HV, N] -> its number n, batch, head, and the offset of its row's first token and head."""
    n, line = index % N, index // N
    head, batch = line % HV, line // HV
    return n.to(tl.int32), batch, head, batch * T * H + head // (HV // H)


@triton.jit
def load_vector(pointer, n, T, stride: tl.constexpr, C: tl.constexpr):
    """One number a row of chunk n, `stride` apart; zeros past T."""
    rows = n * C + tl.arange(0, C)
    return tl.load(pointer + rows.to(tl.int64) * stride, mask=rows < T, other=0.0)


@triton.jit
def invert(lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular tile: substitution in 16 x 16 blocks, then A21 = -A22 lower21 A11.

    Not by powers of `lower`: for correlated keys they grow to 1e16 while the inverse stays of order 1.
    """
    count: tl.constexpr = C // 16
    blocks = tl.reshape(lower, [count, 16, count, 16])
    number = tl.arange(0, count)
    diagonal = number[:, None, None, None] == number[None, None, :, None]
    part = tl.sum(tl.where(diagonal, blocks, 0.0), axis=2)  # [count, 16, 16]
    i = tl.arange(0, 16)
    row = i[None, :, None]
    inverse = tl.zeros([count, 16, 16], tl.float32) + tl.where(row == i[None, None, :], 1.0, 0.0)
    for r in range(1, 16):
        weights = tl.sum(tl.where(row == r, part, 0.0), axis=1)  # row r of each block
        above = tl.sum(weights[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == r, inverse - above[:, None, :], inverse)
    A = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), [C, C])
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in tl.static_range(C // 32):  # C is 16, 32 or 64
        h = 16 << level
        below = tl.where((r // (2 * h) == s // (2 * h)) & (r // h > s // h), lower, 0.0)
        A -= tl.dot(tl.dot(A, below, input_precision=PRECISION), A, input_precision=PRECISION)
    return A


@triton.jit
def halving(G, h, C: tl.constexpr, J: tl.constexpr):
    """exp(-|G - G[m]|) of a tile G [C, J], m the first row of the second half of each row's group of 2 * h rows.

    For r in the second and s in the first half the product of their factors is exp(G[r] - G[s]), and neither exceeds 1.
    """
    rows = tl.arange(0, C)
    anchor = rows // (2 * h) * (2 * h) + h
    distance = G - tl.gather(G, tl.broadcast_to(anchor[:, None], [C, J]), 0)
    return tl.exp(-tl.abs(distance).to(tl.float32))


@triton.jit
def in_halves(h, C: tl.constexpr):
    """[C, C], true where row r is in the second and column s in the first half of one group of 2 * h rows."""
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (r // (2 * h) == s // (2 * h)) & (r // h > s // h)


@triton.jit
def between_rows(g, C: tl.constexpr):
    """Sum of g over s < i <= r at [r, s] (0 for r <= s), as a sum and not a difference of sums."""
    r, s = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.cumsum(tl.where(r > s, g[:, None], 0.0), axis=0)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def prepare_scalar(
    q, k, g, beta, row_start, A, P, vectors, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """No decay or one a head; one chunk of one head a program. A, P [B, HV, N, C, C], vectors [B, HV, N, 3, C].

    Here the decayed operands are row scalings, q~ = scale * into * q, e~ = beta * into * k and k~ = tail * k, which the
    scan applies to results: no copies are made.
    """
    index = tl.program_id(0).to(tl.int64)
    n, batch, head, keys = locate(T, H, HV, N, index)
    starts, last_start = load_starts(row_start, batch, n, T, C)
    b_q = load_rows(q + keys * K, n * C, T, H * K, C, K)
    b_k = load_rows(k + keys * K, n * C, T, H * K, C, K)
    b_beta = load_vector(beta + batch * T * HV + head, n, T, HV, C)
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    sees = (starts[:, None] <= s) & (s <= r)
    qk, kk = dot(b_q, tl.trans(b_k)), dot(b_k, tl.trans(b_k))
    into, tail = tl.where(starts < 0, 1.0, 0.0), tl.where(last_start <= rows, 1.0, 0.0)
    if DECAY == SCALAR:
        b_g = load_vector(g + batch * T * HV + head, n, T, HV, C)
        decay = tl.exp(between_rows(b_g, C))
        qk, kk = qk * decay, kk * decay
        into *= tl.exp(tl.cumsum(b_g, axis=0))
        tail *= tl.exp(tl.sum(tl.where(r > s, b_g[:, None], 0.0), axis=0))
    store_rows(P + index * C * C, tl.where(sees, qk * scale, 0.0), n * 0, C, C, C, C)
    inverse = invert(tl.where(sees & (s < r), kk * b_beta[:, None], 0.0), C, PRECISION)
    store_rows(A + index * C * C, inverse, n * 0, C, C, C, C)
    vectors += index * 3 * C + rows
    tl.store(vectors + INTO * C, into)
    tl.store(vectors + TAIL * C, tail)
    tl.store(vectors + BETA * C, b_beta)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def prepare_channel(
    q, k, g, beta, row_start, A, P, vectors, q_in, e_in, k_out, gamma, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A decay a channel; one chunk of one head a program. q_in, e_in, k_out [B, HV, N * C, K], gamma [B, HV, N, K].

    WIDE: the dtype of sums of g, whose differences are taken: fp32 for bf16 inputs, fp64 for fp32 inputs.
    """
    index = tl.program_id(0).to(tl.int64)
    n, batch, head, keys = locate(T, H, HV, N, index)
    starts, last_start = load_starts(row_start, batch, n, T, C)
    b_beta = load_vector(beta + batch * T * HV + head, n, T, HV, C)
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    reads, writes = (starts < 0)[:, None], (last_start <= rows)[:, None]
    qk, ek = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        b_q = load_rows(q + keys * K + first, n * C, T, H * K, C, BK)
        b_k = load_rows(k + keys * K + first, n * C, T, H * K, C, BK)
        b_g = load_rows(g + (batch * T * HV + head) * K + first, n * C, T, HV * K, C, BK)
        b_g = tl.maximum(b_g, STRONGEST)
        b_e = b_k * b_beta[:, None]  # fp32
        G = tl.cumsum(b_g.to(WIDE), axis=0)
        into = tl.where(reads, tl.exp(G.to(tl.float32)), 0.0)
        after = tl.cumsum(b_g, axis=0, reverse=True) - b_g
        out = index * C * K + first
        store_rows(q_in + out, into * b_q * scale, n * 0, C, K, C, BK)
        store_rows(e_in + out, into * b_e, n * 0, C, K, C, BK)
        store_rows(k_out + out, tl.where(writes, tl.exp(after) * b_k, 0.0), n * 0, C, K, C, BK)
        tl.store(gamma + index * K + first + tl.arange(0, BK), tl.sum(tl.where(r == C - 1, into, 0.0), axis=0))
        qk += tl.where(r == s, tl.sum(b_q.to(tl.float32) * b_k, axis=1)[:, None], 0.0)
        h = C // 2
        while h > 0:
            factor = halving(G, h, C, BK)
            right = tl.trans((b_k * factor).to(q.dtype.element_ty))
            pair = in_halves(h, C)
            qk += tl.where(pair, dot((b_q * factor).to(q.dtype.element_ty), right), 0.0)
            ek += tl.where(pair, dot((b_e * factor).to(q.dtype.element_ty), right), 0.0)
            h = h // 2
    sees = (starts[:, None] <= s) & (s <= r)
    store_rows(P + index * C * C, tl.where(sees, qk * scale, 0.0), n * 0, C, C, C, C)
    inverse = invert(tl.where(sees & (s < r), ek, 0.0), C, PRECISION)
    store_rows(A + index * C * C, inverse, n * 0, C, C, C, C)
    tl.store(vectors + index * 3 * C + BETA * C + rows, b_beta)


@triton.jit
def load_turned(pointer, first, limit, stride: tl.constexpr, J: tl.constexpr, R: tl.constexpr):
    """`load_rows` transposed: rows first .. first + R as the columns of a tile [J, R]."""
    rows = tl.arange(0, R)
    tile = pointer + first.to(tl.int64) * stride + rows[None, :] * stride + tl.arange(0, J)[:, None]
    return tl.load(tile, mask=(first + rows < limit)[None, :], other=0.0)


@triton.jit
def store_turned(pointer, x, first, limit, stride: tl.constexpr, J: tl.constexpr, R: tl.constexpr):
    """The counterpart of `load_turned`."""
    rows = tl.arange(0, R)
    tile = pointer + first.to(tl.int64) * stride + rows[None, :] * stride + tl.arange(0, J)[:, None]
    tl.store(tile, x.to(pointer.dtype.element_ty), mask=(first + rows < limit)[None, :])


@triton.jit(do_not_specialize=["T", "N", "scale"])
def scan(
    q, k, e, v, A, P, vectors, gamma, enter, o, states, residuals, leave, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Carries the state over the chunks of a row; one head and block of values a program.

    Under channel decay q, e and k are q_in, e_in and k_out of `prepare_channel`; else e is not read. SAVE: states
    [B, HV, N, V, K], which meet each chunk, and residuals R [B, HV, N, V, C]. enter and leave [B, HV, K, V] fp32.
    """
    task = tl.program_id(0).to(tl.int64)
    line, column = task // (V // BV), task % (V // BV) * BV
    head, batch = line % HV, line // HV
    values = (batch * T * HV + head) * V + column
    if CHANNEL_DECAY:
        stride: tl.constexpr = K
        limit, keys = N * C, line * N * C * K
    else:
        stride: tl.constexpr = H * K
        limit, keys = T, (batch * T * H + head // (HV // H)) * K
    channels, rows = tl.arange(0, K), tl.arange(0, C)
    own = column + tl.arange(0, BV)[:, None]
    S = tl.load(enter + line * K * V + channels[None, :] * V + own)
    for i in range(0, N):
        index = line * N + i
        n = (index - line * N).to(tl.int32)  # i, as a tensor in the interpreter too
        b_q = load_rows(q + keys, n * C, limit, stride, C, K)
        b_k = load_rows(k + keys, n * C, limit, stride, C, K)
        b_A = load_rows(A + index * C * C, n * 0, C, C, C, C)
        b_P = load_rows(P + index * C * C, n * 0, C, C, C, C)
        b_v = load_turned(v + values, n * C, T, HV * V, BV, C)
        beta = tl.load(vectors + index * 3 * C + BETA * C + rows)
        b_S = S.to(b_q.dtype)
        if SAVE:
            tl.store(states + index * V * K + own * K + channels[None, :], b_S)
        if CHANNEL_DECAY:
            b_e = load_rows(e + keys, n * C, limit, stride, C, K)
            whole = tl.load(gamma + index * K + channels)[None, :]
            X = b_v * beta[None, :] - dot(b_S, tl.trans(b_e))
        else:
            into = tl.load(vectors + index * 3 * C + INTO * C + rows)
            tail = tl.load(vectors + index * 3 * C + TAIL * C + rows)
            whole = tl.load(vectors + index * 3 * C + INTO * C + C - 1)
            X = (b_v - dot(b_S, tl.trans(b_k)) * into[None, :]) * beta[None, :]
        R = dot(X.to(b_q.dtype), tl.trans(b_A))
        b_R = R.to(b_q.dtype)
        b_o = dot(b_S, tl.trans(b_q))
        if not CHANNEL_DECAY:
            b_o *= (into * scale)[None, :]
            R *= tail[None, :]
        b_o += dot(b_R, tl.trans(b_P))
        S = S * whole + dot(R.to(b_q.dtype), b_k)
        if SAVE:
            tl.store(residuals + index * V * C + own * C + rows[None, :], b_R)
        store_turned(o + values, b_o, n * C, T, HV * V, BV, C)
    tl.store(leave + line * K * V + channels[None, :] * V + own, S)
