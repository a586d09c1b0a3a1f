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
TOP = tl.constexpr(5)  # log2 of half the rows of a chunk
STRONGEST = tl.constexpr(-20.0)  # log decay a step: 2e-9, and half a leaf of such steps is in the range of bf16


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
    """(I + lower)^-1 of a strictly lower triangular tile, block after block: A21 = -A22 lower21 A11 of 2, 4, .. C rows.

    Each product is of true parts of the inverse, whose entries stay of order 1 where powers of `lower` grow to 1e16.
    Blocks of up to 16 rows are done for all sixteens at once, [C / 16, 16, 16].
    """
    count: tl.constexpr = C // 16
    number = tl.arange(0, count)
    diagonal = number[:, None, None, None] == number[None, None, :, None]
    part = tl.sum(tl.where(diagonal, tl.reshape(lower, [count, 16, count, 16]), 0.0), axis=2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -part, 0.0))
    for level in tl.static_range(1, 4):
        below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level), part, 0.0)
        inverse -= tl.dot(tl.dot(inverse, below, input_precision=PRECISION), inverse, input_precision=PRECISION)
    A = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(C // 32):  # C is 16, 32 or 64
        below = tl.where(in_halves(4 + level, C), lower, 0.0)
        A -= tl.dot(tl.dot(A, below, input_precision=PRECISION), A, input_precision=PRECISION)
    return A


@triton.jit
def in_halves(level, C: tl.constexpr):
    """[C, C], true where row r is in the second and column s in the first half of one group of 2 * 2 ** level rows."""
    r, s = tl.arange(0, C)[:, None] >> level, tl.arange(0, C)[None, :] >> level
    return (r >> 1 == s >> 1) & (r > s)


@triton.jit
def facing(level, C: tl.constexpr):
    """[C, C], true for whose g lie between row r and the middle of its group of 2 * 2 ** level rows.

    Of a row in the second half those of the half's rows up to and with r, in the first half those after r. Of rows r
    and s that face each other the two together are all s < i <= r.
    """
    r, i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    second = (r >> level) & 1 == 1  # shifts, for a division by a number that is not known is some thirty instructions
    return (r >> level == i >> level) & (second == (i <= r))


@triton.jit
def in_parts(x, like):
    """x as it goes into `sums`: where `like` is bf16 in two parts, exact to 2^-17; else as it is."""
    high = x.to(like.dtype)
    return high, ((x - high) * 256).to(like.dtype)


@triton.jit
def sums(chosen, high, low):
    """Sums over the rows i of a tile in parts that bool [C, C] selects for each row: as sums, never as differences."""
    if high.dtype == tl.float32:
        return dot(tl.where(chosen, 1.0, 0.0), high)
    twice = tl.where(chosen, 2.0, 0.0).to(high.dtype)
    # With a factor on each Triton does not add one product onto the other, as a chain, which it lays out badly.
    return dot(twice, high) * 0.5 + dot(twice, low) * (1 / 512)


@triton.jit
def running(high, low, C: tl.constexpr):
    """Of channel gates in parts [C, J] the decays up to each row and after it, and the level of the leaves.

    A leaf is a group of 2 * 2 ** level rows whose pairs are one product, with factors from the leaf's middle: the whole
    chunk where that decays by no more than exp(-bound), else what serves any gates. fp32 takes smaller ones, for the
    exponent's rounding is an error of the factor.
    """
    r, i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    until = sums(i <= r, high, low)
    bound: tl.constexpr = 60.0 if high.dtype == tl.bfloat16 else 8.0
    smallest: tl.constexpr = 2 if high.dtype == tl.bfloat16 else 0
    leaf = tl.where(tl.min(tl.min(until, axis=1), axis=0) >= -bound, TOP, smallest)
    return tl.exp(until), tl.exp(sums(i > r, high, low)), leaf


@triton.jit
def pairs(exponent, level, leaf, C: tl.constexpr):
    """The pairs s <= r of a level, bool [C, C], and the two factors of their decays, of rows and of columns [C, J].

    Above the leaves r is in the second and s in the first half of one group of 2 * 2 ** level rows. exponent: the sums
    of g of `facing`; in a leaf, where pairs lie in one half too, they count from the middle with their sign.
    """
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    second, in_leaf = (r >> level) & 1 == 1, level == leaf
    by_row = tl.exp(tl.where(in_leaf & (second == 0), -exponent, exponent))
    by_column = tl.exp(tl.where(in_leaf & second, -exponent, exponent))
    chosen = (r >> (level + 1) == s >> (level + 1)) & (s <= r) & (in_leaf | (r >> level > s >> level))
    return chosen, by_row, by_column


@triton.jit
def decays(g, C: tl.constexpr, WIDE: tl.constexpr):
    """exp(G[r] - G[s]) for s <= r, else 0 [C, C], exp(G) and exp(G[-1] - G) [C], of one decay a row."""
    rows = tl.arange(0, C)
    G = tl.cumsum(tl.maximum(g, STRONGEST).to(WIDE), axis=0)
    end = tl.sum(tl.where(rows == C - 1, G, 0.0), axis=0)
    between = (G[:, None] - G[None, :]).to(tl.float32)
    inside = tl.exp(tl.where(rows[:, None] >= rows[None, :], between, float("-inf")))
    return inside, tl.exp(G.to(tl.float32)), tl.exp((end - G).to(tl.float32))


@triton.jit(do_not_specialize=["T", "N", "scale"])
def prepare_scalar(
    q, k, g, beta, row_start, A, P, vectors, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """No decay or one a head; one chunk of one head a program. A, P [B, HV, N, C, C], vectors [B, HV, N, 3, C].

    Here the decayed operands are row scalings, q~ = scale * into * q, e~ = beta * into * k and k~ = tail * k, which the
    scan applies to results: no copies are made. WIDE: the dtype of sums of g, whose differences are taken.
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
        decay, until, after = decays(b_g, C, WIDE)
        qk, kk = qk * decay, kk * decay
        into, tail = into * until, tail * after
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
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A decay a channel; one chunk of one head a program. q_in, e_in, k_out [B, HV, N * C, K], gamma [B, HV, N, K].

    Pairs of rows by halving: between the two halves of a group of 64, 32, .. rows the decay is a product of two factors
    that are at most 1, and so all pairs of a level are one matrix product. Pairs in leaves (`running`) are another;
    with ordinary gates the chunk is one leaf.
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
        b_e = b_k * b_beta[:, None]  # fp32
        high, low = in_parts(tl.maximum(b_g, STRONGEST), b_k)
        into, after, leaf = running(high, low, C)
        into, after = tl.where(reads, into, 0.0), tl.where(writes, after, 0.0)
        out = index * C * K + first
        store_rows(q_in + out, into * b_q * scale, n * 0, C, K, C, BK)
        store_rows(e_in + out, into * b_e, n * 0, C, K, C, BK)
        store_rows(k_out + out, after * b_k, n * 0, C, K, C, BK)
        tl.store(gamma + index * K + first + tl.arange(0, BK), tl.sum(tl.where(r == C - 1, into, 0.0), axis=0))
        level = TOP
        while level >= leaf:
            chosen, by_row, by_column = pairs(sums(facing(level, C), high, low), level, leaf, C)
            right = tl.trans((b_k * by_column).to(q.dtype.element_ty))
            qk += tl.where(chosen, dot((b_q * by_row).to(q.dtype.element_ty), right), 0.0)
            ek += tl.where(chosen, dot((b_e * by_row).to(q.dtype.element_ty), right), 0.0)
            level -= 1
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
