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
GROUP = tl.constexpr(8)  # chunks a program of the kernels for steep ones
TOP = tl.constexpr(5)  # log2 of half the rows of a chunk
STRONGEST = tl.constexpr(-20.0)  # log decay a step: 2e-9, and half a leaf of such steps is in the range of bf16
BOUND, BOUND_FP32 = tl.constexpr(72.0), tl.constexpr(4.0)  # a chunk is steep if a half decays by more than exp(-BOUND)


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
def load_strengths(beta, n, T, stride: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr):
    """beta of chunk n [C]; ones where erase keys and values are as given."""
    return load_vector(beta, n, T, stride, C) if TIED else tl.full([C], 1.0, tl.float32)


@triton.jit
def load_erase_keys(e, b_k, b_beta, n, T, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
                    TIED: tl.constexpr):  # fmt: skip
    """BK channels of the erase keys of chunk n in fp32: beta * k, or free ones [B, T, HV, K] from e."""
    return b_k * b_beta[:, None] if TIED else load_rows(e, n * C, T, HV * K, C, BK).to(tl.float32)


@triton.jit
def invert(lower, EXACT: tl.constexpr, C: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular tile, block after block: A21 = -A22 lower21 A11 of 2, 4, .. C rows.

    Each product is of true parts of the inverse, whose entries stay of order 1 where powers of `lower` grow to 1e16.
    Blocks of up to 16 rows are done for all sixteens at once, [C / 16, 16, 16]. EXACT: products in fp32; else they are
    exact to 2^-16, for an inverse that is rounded to bf16. Three tf32 products are not enough for fp32: their errors
    add up over the levels, up to 1.75 times the error budget.
    """
    count: tl.constexpr = C // 16
    number = tl.arange(0, count)
    diagonal = number[:, None, None, None] == number[None, None, :, None]
    part = tl.sum(tl.where(diagonal, tl.reshape(lower, [count, 16, count, 16]), 0.0), axis=2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -part, 0.0))
    for level in tl.static_range(1, 4):
        below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level), part, 0.0)
        inverse -= between(inverse, below, EXACT)
    A = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(C // 32):  # C is 16, 32 or 64
        A -= between(A, tl.where(in_halves(4 + level, C), lower, 0.0), EXACT)
    return A


@triton.jit
def between(x, y, EXACT: tl.constexpr):
    """x @ y @ x."""
    if EXACT:
        return tl.dot(tl.dot(x, y, input_precision="ieee"), x, input_precision="ieee")
    x_high, x_low = in_parts(x, tl.bfloat16)
    y_high, y_low = in_parts(y, tl.bfloat16)
    left = tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    high, low = in_parts(left, tl.bfloat16)
    return tl.dot(high, x_high, tl.dot(high, x_low, tl.dot(low, x_high)))


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
def in_parts(x, dtype: tl.constexpr):
    """fp32 x as an operand of exact products: for bf16 two parts, exact to 2^-16; for fp32 x itself."""
    if dtype == tl.float32:
        return x, x
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)  # rounded, in fp32
    return high.to(dtype), (x - high).to(dtype)


@triton.jit
def products(ones, high, low):
    """ones [C, C], zeros and ones, @ a tile [C, J] in parts."""
    if high.dtype == tl.float32:
        return dot(ones, high)
    return dot(ones, low, dot(ones, high))


@triton.jit
def sums(chosen, high, low):
    """Sums over the rows i of a tile in parts that bool [C, C] selects for each row: as sums, never as differences."""
    return products(tl.where(chosen, 1.0, 0.0).to(high.dtype), high, low)


@triton.jit
def pairs(exponent, level, LEAF: tl.constexpr, C: tl.constexpr):
    """The pairs s <= r of a level, bool [C, C], and the two factors of their decays, of rows and of columns [C, J].

    Above the leaves r is in the second and s in the first half of one group of 2 * 2 ** level rows. exponent: the sums
    of g of `facing`; in a leaf, where pairs lie in one half too, they count from the middle with their sign.
    """
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    second, in_leaf = (r >> level) & 1 == 1, level == LEAF
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
    q, k, e, g, beta, row_start, A, P, vectors, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, TIED: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """No decay or one a head; one chunk of one head a program. A, P [B, HV, N, C, C], vectors [B, HV, N, 3, C].

    Here the decayed operands are row scalings, q~ = scale * into * q, e~ = into * e and k~ = tail * k, which the scan
    applies to results, as it does beta where e = beta * k (TIED): no copies are made. WIDE: the dtype of sums of g,
    whose differences are taken.
    """
    index = tl.program_id(0).to(tl.int64)
    n, batch, head, keys = locate(T, H, HV, N, index)
    starts, last_start = load_starts(row_start, batch, n, T, C)
    b_q = load_rows(q + keys * K, n * C, T, H * K, C, K)
    b_k = load_rows(k + keys * K, n * C, T, H * K, C, K)
    b_beta = load_strengths(beta + batch * T * HV + head, n, T, HV, C, TIED)
    b_e = b_k if TIED else load_rows(e + (batch * T * HV + head) * K, n * C, T, HV * K, C, K)
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    sees = (starts[:, None] <= s) & (s <= r)
    qk, ek = dot(b_q, tl.trans(b_k)), dot(b_e, tl.trans(b_k))
    into, tail = tl.where(starts < 0, 1.0, 0.0), tl.where(last_start <= rows, 1.0, 0.0)
    if DECAY == SCALAR:
        b_g = load_vector(g + batch * T * HV + head, n, T, HV, C)
        decay, until, after = decays(b_g, C, WIDE)
        qk, ek = qk * decay, ek * decay
        into, tail = into * until, tail * after
    store_rows(P + index * C * C, tl.where(sees, qk * scale, 0.0), n * 0, C, C, C, C)
    inverse = invert(tl.where(sees & (s < r), ek * b_beta[:, None], 0.0), EXACT, C)
    store_rows(A + index * C * C, inverse, n * 0, C, C, C, C)
    vectors += index * 3 * C + rows
    tl.store(vectors + INTO * C, into)
    tl.store(vectors + TAIL * C, tail)
    tl.store(vectors + BETA * C, b_beta)


@triton.jit
def store_products(
    qk, ek, row_start, A, P, vectors, b_beta, batch, n, T, index, scale, EXACT: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A, P and beta of one chunk under channel decay, from its products qk and ek [C, C], not yet masked."""
    starts, _ = load_starts(row_start, batch, n, T, C)
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    sees = (starts[:, None] <= s) & (s <= r)
    store_rows(P + index * C * C, tl.where(sees, qk * scale, 0.0), n * 0, C, C, C, C)
    inverse = invert(tl.where(sees & (s < r), ek, 0.0), EXACT, C)
    store_rows(A + index * C * C, inverse, n * 0, C, C, C, C)
    tl.store(vectors + index * 3 * C + BETA * C + rows, b_beta)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def prepare_channel(
    q, k, e, g, beta, row_start, triangle, A, P, vectors, q_in, e_in, k_out, gamma, halves, steep, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """A decay a channel; one chunk of one head a program. q_in, e_in, k_out [B, HV, N * C, K], gamma [B, HV, N, K].

    The decay between two rows is a product of two factors, from the middle of the chunk, so that all pairs are one
    matrix product; where these grow too large the chunk is marked in steep [B, HV, N], for `prepare_steep` to do it
    anew. halves [B, HV, N, 2, K]: the sums of g over the first half of the chunk's rows and over all others. triangle
    [C, C]: ones on and below the diagonal; read from memory, for Triton forms and lays it out number by number.
    """
    index = tl.program_id(0).to(tl.int64)
    n, batch, head, keys = locate(T, H, HV, N, index)
    starts, last_start = load_starts(row_start, batch, n, T, C)
    b_beta = load_strengths(beta + batch * T * HV + head, n, T, HV, C, TIED)
    r = tl.arange(0, C)[:, None]
    reads, writes = (starts < 0)[:, None], last_start <= r
    qk, ek, strongest = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), 0.0
    for first in range(0, K, BK):
        b_g = load_rows(g + (batch * T * HV + head) * K + first, n * C, T, HV * K, C, BK)
        b_q = load_rows(q + keys * K + first, n * C, T, H * K, C, BK)
        b_k = load_rows(k + keys * K + first, n * C, T, H * K, C, BK)
        high, low = in_parts(tl.maximum(b_g, STRONGEST), b_k.dtype)
        G = products(load_rows(triangle, n * 0, C, C, C, C), high, low)
        until = tl.sum(tl.where(r == C // 2 - 1, G, 0.0), axis=0)
        after = tl.sum(tl.where(r == C - 1, G, 0.0), axis=0) - until
        strongest = tl.maximum(strongest, -tl.min(tl.minimum(until, after), axis=0))
        channels = first + tl.arange(0, BK)
        tl.store(halves + index * 2 * K + channels, until)
        tl.store(halves + index * 2 * K + K + channels, after)
        whole = tl.sum(tl.where((r == C - 1) & reads, 1.0, 0.0)) * tl.exp(until + after)
        tl.store(gamma + index * K + channels, whole)
        G -= until[None, :]
        by_row, by_column = tl.exp(G), tl.exp(-G)
        own = e + (batch * T * HV + head) * K + first
        b_e = load_erase_keys(own, b_k, b_beta, n, T, HV, K, BK, C, TIED) * by_row
        b_q, b_k = b_q * by_row, b_k * by_column
        right = tl.trans(b_k.to(q.dtype.element_ty))
        qk = dot(b_q.to(q.dtype.element_ty), right, qk)
        ek = dot(b_e.to(q.dtype.element_ty), right, ek)
        into = tl.exp(until)[None, :]
        out = index * C * K + first
        store_rows(q_in + out, tl.where(reads, b_q * (into * scale), 0.0), n * 0, C, K, C, BK)
        store_rows(e_in + out, tl.where(reads, b_e * into, 0.0), n * 0, C, K, C, BK)
        store_rows(k_out + out, tl.where(writes, b_k * tl.exp(after)[None, :], 0.0), n * 0, C, K, C, BK)
    bound: tl.constexpr = BOUND if q.dtype.element_ty == tl.bfloat16 else BOUND_FP32
    tl.store(steep + index, (strongest > bound).to(tl.int32))
    store_products(qk, ek, row_start, A, P, vectors, b_beta, batch, n, T, index, scale, EXACT, C)


@triton.jit
def any_steep(steep, begin, chunks):
    """Whether one of GROUP chunks is: programs that look at one chunk each take longer to start than to look."""
    some = begin + tl.arange(0, GROUP)
    return tl.max(tl.load(steep + some, mask=some < chunks, other=0), axis=0) > 0


@triton.jit(do_not_specialize=["T", "N", "scale", "chunks"])
def prepare_steep(
    q, k, e, g, beta, row_start, steep, A, P, vectors, q_in, e_in, k_out, gamma, T, N, scale, chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    EXACT: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """`prepare_channel` of the steep ones of GROUP chunks, under any decay, by halving.

    Between the two halves of a group of 64, 32, .. rows the decay is a product of two factors that are at most 1, and
    so all pairs of a level are one matrix product. Pairs in leaves, groups of 2 * 2 ** LEAF rows, are another, with
    factors from the leaf's middle.
    """
    begin = tl.program_id(0) * GROUP
    if any_steep(steep, begin, chunks):
        for i in range(begin, tl.minimum(begin + GROUP, chunks)):
            if tl.load(steep + i) > 0:
                prepare_steep_chunk(
                    q, k, e, g, beta, row_start, A, P, vectors, q_in, e_in, k_out, gamma, T, N, scale,
                    i + tl.zeros([], tl.int64), H, HV, K, BK, C, TIED, EXACT, LEAF,
                )  # fmt: skip


@triton.jit
def prepare_steep_chunk(
    q, k, e, g, beta, row_start, A, P, vectors, q_in, e_in, k_out, gamma, T, N, scale, index,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
    EXACT: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """Chunk `index` of `prepare_steep`."""
    n, batch, head, keys = locate(T, H, HV, N, index)
    starts, last_start = load_starts(row_start, batch, n, T, C)
    b_beta = load_strengths(beta + batch * T * HV + head, n, T, HV, C, TIED)
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    reads, writes = (starts < 0)[:, None], (last_start <= rows)[:, None]
    qk, ek = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        b_q = load_rows(q + keys * K + first, n * C, T, H * K, C, BK)
        b_k = load_rows(k + keys * K + first, n * C, T, H * K, C, BK)
        b_g = load_rows(g + (batch * T * HV + head) * K + first, n * C, T, HV * K, C, BK)
        own = e + (batch * T * HV + head) * K + first
        b_e = load_erase_keys(own, b_k, b_beta, n, T, HV, K, BK, C, TIED)
        high, low = in_parts(tl.maximum(b_g, STRONGEST), b_k.dtype)
        into = tl.where(reads, tl.exp(sums(s <= r, high, low)), 0.0)
        after = tl.where(writes, tl.exp(sums(s > r, high, low)), 0.0)
        out = index * C * K + first
        store_rows(q_in + out, into * b_q * scale, n * 0, C, K, C, BK)
        store_rows(e_in + out, into * b_e, n * 0, C, K, C, BK)
        store_rows(k_out + out, after * b_k, n * 0, C, K, C, BK)
        tl.store(gamma + index * K + first + tl.arange(0, BK), tl.sum(tl.where(r == C - 1, into, 0.0), axis=0))
        level = TOP
        while level >= LEAF:
            chosen, by_row, by_column = pairs(sums(facing(level, C), high, low), level, LEAF, C)
            right = tl.trans((b_k * by_column).to(q.dtype.element_ty))
            qk += tl.where(chosen, dot((b_q * by_row).to(q.dtype.element_ty), right), 0.0)
            ek += tl.where(chosen, dot((b_e * by_row).to(q.dtype.element_ty), right), 0.0)
            level -= 1
    store_products(qk, ek, row_start, A, P, vectors, b_beta, batch, n, T, index, scale, EXACT, C)


@triton.jit
def store_turned(pointer, x, first, limit, stride: tl.constexpr, J: tl.constexpr, R: tl.constexpr):
    """`store_rows` of the transpose of a tile [J, R]: its columns are rows first .. first + R."""
    rows = tl.arange(0, R)
    tile = pointer + first.to(tl.int64) * stride + rows[None, :] * stride + tl.arange(0, J)[:, None]
    tl.store(tile, x.to(pointer.dtype.element_ty), mask=(first + rows < limit)[None, :])


@triton.jit(do_not_specialize=["T", "N", "scale", "segments", "per"])
def scan(
    q, k, e, v, A, P, vectors, gamma, enter, o, states, residuals, leave, T, N, scale, segments, per,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, TIED: tl.constexpr, ENTER: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Carries the state over the `per` chunks of a segment; one segment, head and block of values a program.

    Under channel decay q, e and k are q_in, e_in and k_out of `prepare_channel`; else e is read unless TIED. enter
    [B, HV, segments, K, V] fp32, zeros without ENTER; leave [B, HV, K, V]. SAVE: states [B, HV, N, V, K], which meet
    each chunk, and residuals R [B, HV, N, V, C].

    Without OUTPUT what each segment does to a state, leave [B, HV, segments, V + K, K]: each row of the transposed
    state goes its own way, state @ map + made; the first V rows are those made of zero, the others the map, as what
    becomes of the rows of the identity where nothing is written.
    """
    reach: tl.constexpr = V if OUTPUT else V + K
    index = tl.program_id(0).to(tl.int64)
    task, column = index // (reach // BV), index % (reach // BV) * BV
    segment, line = (task % segments).to(tl.int32), task // segments
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
    if ENTER:
        S = tl.load(enter + task * K * V + channels[None, :] * V + own)
    else:  # below the values' rows, where there are any, the identity
        S = tl.where(own - V == channels[None, :], 1.0, 0.0)
    for i in range(segment * per, tl.minimum(segment * per + per, N)):
        chunk = line * N + i
        n = (chunk - line * N).to(tl.int32)  # i, as a tensor in the interpreter too
        b_k = load_rows(k + keys, n * C, limit, stride, C, K)
        b_A = load_rows(A + chunk * C * C, n * 0, C, C, C, C)
        written = T if OUTPUT else tl.where(column < V, T, 0)
        b_v = tl.trans(load_rows(v + values, n * C, written, HV * V, C, BV))
        beta = tl.load(vectors + chunk * 3 * C + BETA * C + rows)
        b_S = S.to(b_k.dtype)
        if SAVE:
            tl.store(states + chunk * V * K + own * K + channels[None, :], b_S)
        if CHANNEL_DECAY:
            b_e = load_rows(e + keys, n * C, limit, stride, C, K)
            whole = tl.load(gamma + chunk * K + channels)[None, :]
            X = b_v * beta[None, :] - dot(b_S, tl.trans(b_e))
        else:
            into = tl.load(vectors + chunk * 3 * C + INTO * C + rows)
            tail = tl.load(vectors + chunk * 3 * C + TAIL * C + rows)
            whole = tl.load(vectors + chunk * 3 * C + INTO * C + C - 1)
            b_e = b_k if TIED else load_rows(e + (batch * T * HV + head) * K, n * C, T, HV * K, C, K)
            X = (b_v - dot(b_S, tl.trans(b_e)) * into[None, :]) * beta[None, :]
        R = dot(X.to(b_k.dtype), tl.trans(b_A))
        b_R = R.to(b_k.dtype)
        if OUTPUT:
            b_q = load_rows(q + keys, n * C, limit, stride, C, K)
            b_P = load_rows(P + chunk * C * C, n * 0, C, C, C, C)
            b_o = dot(b_S, tl.trans(b_q))
            if not CHANNEL_DECAY:
                b_o *= (into * scale)[None, :]
            b_o += dot(b_R, tl.trans(b_P))
            store_turned(o + values, b_o, n * C, T, HV * V, BV, C)
        if not CHANNEL_DECAY:
            R *= tail[None, :]
        S = S * whole + dot(R.to(b_k.dtype), b_k)
        if SAVE:
            tl.store(residuals + chunk * V * C + own * C + rows[None, :], b_R)
    if not OUTPUT:
        tl.store(leave + (task * reach + own) * K + channels[None, :], S)
    elif segment == segments - 1:
        tl.store(leave + line * K * V + channels[None, :] * V + own, S)


@triton.jit(do_not_specialize=["segments"])
def join(
    made, maps, first, enter, segments,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, MADE: tl.constexpr, FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """The state that enters each segment, in fp32 products; one head and block of values a program.

    made [B, HV, segments, MADE, K], its first V rows what a segment makes of zero; maps [B, HV, segments, V + K, K],
    its last K rows what it does to a state; first [B, HV, K, V], zeros without FIRST; enter [B, HV, segments, K, V].
    REVERSE: gradients of the state, from the last segment to the first, whose maps are the transposed ones.
    """
    line, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    channels, inner, own = tl.arange(0, K)[:, None], tl.arange(0, BK), column + tl.arange(0, BV)[None, :]
    S = tl.zeros([K, BV], tl.float32)
    if FIRST:
        S += tl.load(first + line * K * V + channels * V + own)
    for i in range(segments):
        segment = line * segments + (segments - 1 - i if REVERSE else i)
        state = enter + segment * K * V
        tl.store(state + channels * V + own, S)
        through = maps + (segment * (V + K) + V) * K
        if BK == K:
            b_map = tl.load(through + channels * K + inner[None, :])
            S = dot(b_map if REVERSE else tl.trans(b_map), S, tl.load(made + (segment * MADE + own) * K + channels))
        else:
            tl.debug_barrier()  # what one thread stored another loads
            S = tl.load(made + (segment * MADE + own) * K + channels)
            for block in range(0, K, BK):
                some = block + inner
                if REVERSE:
                    b_map = tl.load(through + channels * K + some[None, :])
                else:
                    b_map = tl.load(through + some[None, :] * K + channels)
                S = dot(b_map, tl.load(state + some[:, None] * V + own), S)
