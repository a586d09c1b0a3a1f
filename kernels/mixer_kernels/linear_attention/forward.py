"""Triton kernels: scores of channel decay, and the scan over chunks that also writes the output.

Under no or scalar decay one launch is the whole forward pass. Under channel decay `scores` first forms, for every chunk
in parallel, what the scan needs, and `scores_steep` redoes the chunks whose decay is too strong for one product. The
same scan run backwards in time, with queries and keys exchanged, gives the gradients of states and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows

NONE, SCALAR, CHANNEL = (tl.constexpr(i) for i in range(3))
BOUND = tl.constexpr(64.0)  # a chunk that decays by at most exp(-BOUND) is one product, which stays finite in bf16
LEAF = tl.constexpr(16)  # rows of a tile that is formed elementwise


@triton.jit(do_not_specialize=["T", "N", "scale"])
def scores(
    q, k, g, row_start, A, q_read, k_write, through, steep, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Channel decay, one chunk of one head a program.

    A [B, HV, N, C, C]: scale * q[r] . k[s] under the decay between them, where r sees s; q_read and k_write
    [B, HV, N * C, K]: q under the decay from the chunk's start (and scale), k under the decay to its end, zero in rows
    that do not read the incoming or write the outgoing state; through [B, HV, N, K]: the decay of the whole chunk, zero
    if a document begins in it; steep [B, HV, N]: the strongest decay of a channel, as a positive number.
    """
    chunk = tl.program_id(0).to(tl.int64)
    n, head, batch = (chunk % N).to(tl.int32), chunk // N % HV, chunk // N // HV
    starts, last_start = load_starts(row_start, batch, n, T, C)
    rows = tl.arange(0, C)
    reads, writes = (starts < 0)[:, None], (last_start <= rows)[:, None]
    tokens = batch * T
    q += (tokens * H + head // (HV // H)) * K
    k += (tokens * H + head // (HV // H)) * K
    g += (tokens * HV + head) * K
    acc = tl.zeros([C, C], tl.float32)
    strongest = 0.0
    for first in range(0, K, BK):
        G = tl.cumsum(load_rows(g + first, n * C, T, HV * K, C, BK), axis=0)
        b_q = load_rows(q + first, n * C, T, H * K, C, BK).to(tl.float32)
        b_k = load_rows(k + first, n * C, T, H * K, C, BK).to(tl.float32)
        end = tl.sum(tl.where(rows[:, None] == C - 1, G, 0.0), axis=0)
        middle = tl.sum(tl.where(rows[:, None] == C // 2, G, 0.0), axis=0)
        strongest = tl.maximum(strongest, tl.max(-end))
        read = tl.where(reads, b_q * tl.exp(G) * scale, 0.0)
        write = tl.where(writes, b_k * tl.exp(end[None, :] - G), 0.0)
        store_rows(q_read + chunk * C * K + first, read, 0, C, K, C, BK)
        store_rows(k_write + chunk * C * K + first, write, 0, C, K, C, BK)
        columns = first + tl.arange(0, BK)
        tl.store(through + chunk * K + columns, tl.where(last_start < 0, tl.exp(end), 0.0))
        offset = G - middle[None, :]  # clamped: a steep chunk is formed anew, but must not make NaN of a later product
        by_row = (b_q * tl.exp(tl.minimum(offset, BOUND))).to(q.dtype.element_ty)
        by_column = (b_k * tl.exp(tl.minimum(-offset, BOUND))).to(q.dtype.element_ty)
        acc += dot(by_row, tl.trans(by_column))
    sees = (starts[:, None] <= rows[None, :]) & (rows[None, :] <= rows[:, None])
    store_rows(A + chunk * C * C, tl.where(sees, acc * scale, 0.0), 0, C, C, C, C)
    tl.store(steep + chunk, strongest)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def scores_steep(
    q, k, g, row_start, A, steep, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A of the chunks that `scores` found steep, by halving: LEAF rows a program, against all columns.

    In a square (later half of the rows against the earlier half) the reference is the gate at the corner between the
    halves, so that both factors are at most 1. The last LEAF x LEAF triangle is formed elementwise.
    """
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(steep + chunk) <= BOUND:
        return
    n, head, batch = (chunk % N).to(tl.int32), chunk // N % HV, chunk // N // HV
    block = tl.program_id(1) * LEAF
    rows, columns, own = block + tl.arange(0, LEAF), tl.arange(0, C), tl.arange(0, LEAF)
    tokens = batch * T
    q += (tokens * H + head // (HV // H)) * K
    k += (tokens * H + head // (HV // H)) * K
    g += (tokens * HV + head) * K
    acc = tl.zeros([LEAF, C], tl.float32)
    for first in range(0, K, BK):
        b_g = load_rows(g + first, n * C, T, HV * K, C, BK)
        G = tl.cumsum(b_g, axis=0)
        b_k = load_rows(k + first, n * C, T, H * K, C, BK).to(tl.float32)
        own_q = load_rows(q + first, n * C + block, T, H * K, LEAF, BK).to(tl.float32)
        own_g = load_rows(g + first, n * C + block, T, HV * K, LEAF, BK)
        own_G = tl.cumsum(own_g, axis=0) + tl.sum(tl.where(columns[:, None] < block, b_g, 0.0), axis=0)[None, :]
        for level in tl.static_range(2):
            half = LEAF << level
            base = block // (2 * half) * (2 * half)
            in_square = (base <= columns) & (columns < base + half) & (block >= base + half)
            corner = tl.sum(tl.where(columns[:, None] < base + half, b_g, 0.0), axis=0)[None, :]
            by_row = tl.exp(tl.minimum(own_G - corner, 0.0))
            by_column = tl.exp(tl.where(in_square[:, None], tl.minimum(corner - G, 0.0), float("-inf")))
            row_side = (own_q * by_row).to(q.dtype.element_ty)
            acc += dot(row_side, tl.trans((b_k * by_column).to(q.dtype.element_ty)))
        for j in range(LEAF):
            k_j = tl.sum(tl.where(columns[:, None] == block + j, b_k, 0.0), axis=0)[None, :]
            G_j = tl.sum(tl.where(own[:, None] == j, own_G, 0.0), axis=0)[None, :]
            column = tl.sum(own_q * k_j * tl.exp(tl.minimum(own_G - G_j, 0.0)), axis=1)
            acc += tl.where(columns[None, :] == block + j, column[:, None], 0.0)
    base = row_start + tokens
    starts = tl.load(base + tl.minimum(n * C + rows, T - 1)) - n * C
    sees = (starts[:, None] <= columns[None, :]) & (columns[None, :] <= rows[:, None])
    store_rows(A + chunk * C * C, tl.where(sees, acc * scale, 0.0), block, C, C, LEAF, C)


@triton.jit
def row_weights(g, starts, last_start, scale, DECAY: tl.constexpr, C: tl.constexpr):
    """No or scalar decay: G of each row, its weight where it reads the incoming state and where it writes the outgoing
    one, and the whole chunk's decay."""
    rows = tl.arange(0, C)
    if DECAY == SCALAR:
        G = tl.cumsum(g, axis=0)
        end = tl.sum(g, axis=0)
    else:
        G = tl.zeros([C], tl.float32)
        end = 0.0
    read = tl.where(starts < 0, tl.exp(G) * scale, 0.0)
    write = tl.where(last_start <= rows, tl.exp(tl.minimum(end - G, 0.0)), 0.0)
    return G, read, write, tl.where(last_start < 0, tl.exp(end), 0.0)


@triton.jit
def load_gates(g, n, T, HV: tl.constexpr, DECAY: tl.constexpr, C: tl.constexpr):
    """Scalar gates of chunk n [C], zero past T; a placeholder without decay."""
    rows = n * C + tl.arange(0, C)
    if DECAY == SCALAR:
        return tl.load(g + rows.to(tl.int64) * HV, mask=rows < T, other=0.0)
    return tl.zeros([C], tl.float32)


@triton.jit(do_not_specialize=["T", "N", "segments", "per", "scale"])
def scan(
    x, y, values, g, A, through, row_start, enter, out, states, leave, decay, T, N, segments, per, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, REVERSE: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Carries a state [K, BV] over the `per` chunks of a segment; one segment, head and block of values a program.

    Forward in time x is q, y is k, values is v and out is o; REVERSE, x is k, y is q, values is do and out is dv, and
    the state is the gradient of the state. Under channel decay x and y are q_read and k_write of `scores`, with A and
    through. Without OUTPUT only the segment's effect is computed: the state that it makes of zero, and its decay.

    enter [B, HV, segments, K, V] fp32; states [B, HV, N, K, V]: the state that meets each chunk (SAVE); leave: the
    state after the last segment [B, HV, K, V], or without OUTPUT after each; decay [B, HV, segments, K].
    """
    task = tl.program_id(0).to(tl.int64)
    segment, line = (task % segments).to(tl.int32), task // segments  # a line is one head of one row
    head, batch = line % HV, line // HV
    tokens = batch * T
    column = tl.program_id(1) * BV
    values += (tokens * HV + head) * V + column
    out += (tokens * HV + head) * V + column
    g += tokens * HV + head
    if DECAY == CHANNEL:
        x_stride: tl.constexpr = K
        limit = N * C
        x += line * N * C * K
        y += line * N * C * K
    else:
        x_stride: tl.constexpr = H * K
        limit = T
        x += (tokens * H + head // (HV // H)) * K
        y += (tokens * H + head // (HV // H)) * K
    tile = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
    keys, rows = tl.arange(0, K), tl.arange(0, C)

    S = tl.zeros([K, BV], tl.float32)
    if OUTPUT:
        S += tl.load(enter + task * K * V + tile)
    total = tl.full([K], 1.0, tl.float32)
    begin, end = segment * per, tl.minimum(segment * per + per, N)
    for i in range(begin, end):
        n = begin + end - 1 - i if REVERSE else i
        b_y = load_rows(y, n * C, limit, x_stride, C, K)
        b_v = load_rows(values, n * C, T, HV * V, C, BV)
        if SAVE:
            tl.store(states + (line * N + n) * K * V + tile, S.to(states.dtype.element_ty))
        if DECAY == CHANNEL:
            whole = tl.load(through + (line * N + n) * K + keys)
            if OUTPUT:
                b_x = load_rows(x, n * C, limit, x_stride, C, K)
                b_A = load_rows(A + (line * N + n) * C * C, 0, C, C, C, C)
                if REVERSE:
                    b_A = tl.trans(b_A)
                b_o = dot(b_x, S.to(b_x.dtype)) + dot(b_A, b_v)
            S = S * whole[:, None] + dot(tl.trans(b_y), b_v)
            total *= whole
        else:
            starts, last_start = load_starts(row_start, batch, n, T, C)
            b_g = load_gates(g, n, T, HV, DECAY, C)
            G, read, write, whole = row_weights(b_g, starts, last_start, scale, DECAY, C)
            if OUTPUT:
                b_x = load_rows(x, n * C, limit, x_stride, C, K)
                P = dot(b_x, tl.trans(b_y))
                if REVERSE:  # rows of P are s, columns r
                    sees = (starts[None, :] <= rows[:, None]) & (rows[:, None] <= rows[None, :])
                    between = G[None, :] - G[:, None]
                else:
                    sees = (starts[:, None] <= rows[None, :]) & (rows[None, :] <= rows[:, None])
                    between = G[:, None] - G[None, :]
                P = P * tl.exp(tl.where(sees, between, float("-inf"))) * scale
                b_o = dot(b_x, S.to(b_x.dtype)) * (write if REVERSE else read)[:, None]
                b_o += dot(P.to(b_v.dtype), b_v)
            weighted = b_v * (read if REVERSE else write)[:, None]
            S = S * whole + dot(tl.trans(b_y), weighted.to(b_v.dtype))
            total *= whole
        if OUTPUT:
            store_rows(out, b_o, n * C, T, HV * V, C, BV)
    if not OUTPUT:
        tl.store(leave + task * K * V + tile, S)
        if column == 0:
            tl.store(decay + task * K + keys, total)
    elif segment == (0 if REVERSE else segments - 1):
        tl.store(leave + line * K * V + tile, S)


@triton.jit(do_not_specialize=["segments"])
def prefix(
    decay, made, first, enter, segments, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr
):
    """The state that enters each segment, from what each makes of zero and its decay; a block of values a program.

    decay [B, HV, segments, K], made and enter [B, HV, segments, K, V], first [B, HV, K, V].
    """
    line = tl.program_id(0).to(tl.int64)
    keys = tl.arange(0, K)
    tile = keys[:, None] * V + tl.program_id(1) * BV + tl.arange(0, BV)[None, :]
    S = tl.load(first + line * K * V + tile)
    for i in range(segments):
        segment = line * segments + (segments - 1 - i if REVERSE else i)
        tl.store(enter + segment * K * V + tile, S)
        S = S * tl.load(decay + segment * K + keys)[:, None] + tl.load(made + segment * K * V + tile)
