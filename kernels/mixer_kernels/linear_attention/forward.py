"""Triton kernels: the scores inside chunks, and the scan over chunks that also writes the output.

`scores` forms for every chunk in parallel all that depends on gates and boundaries; under channel decay `scores_steep`
redoes the chunks whose decay is too strong for one product. `scan` then knows of neither: it carries the state from
chunk to chunk. Run backwards in time, with queries and keys exchanged, it gives the gradients of states and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows, triangle_sums

NONE, SCALAR, CHANNEL = (tl.constexpr(i) for i in range(3))
BOUND = tl.constexpr(64.0)  # a chunk that decays by at most exp(-BOUND) is one product, which stays finite in bf16
LEAF = tl.constexpr(16)  # rows of a tile that is formed elementwise


@triton.jit
def load_gates(g, n, T, HV: tl.constexpr, DECAY: tl.constexpr, C: tl.constexpr):
    """Scalar gates of chunk n [C], zero past T; zeros without decay."""
    rows = n * C + tl.arange(0, C)
    if DECAY == SCALAR:
        return tl.load(g + rows.to(tl.int64) * HV, mask=rows < T, other=0.0)
    return tl.zeros([C], tl.float32)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def scores(
    q, k, g, row_start, A, q_read, k_write, through, steep, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One chunk of one head a program.

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
    sees = (starts[:, None] <= rows[None, :]) & (rows[None, :] <= rows[:, None])
    tokens = batch * T
    q += (tokens * H + head // (HV // H)) * K
    k += (tokens * H + head // (HV // H)) * K
    acc = tl.zeros([C, C], tl.float32)
    if DECAY == CHANNEL:
        g += (tokens * HV + head) * K
        triangle = rows[:, None] >= rows[None, :]
        strongest = 0.0
    else:
        G = tl.cumsum(load_gates(g + tokens * HV + head, n, T, HV, DECAY, C), axis=0)
        end = tl.sum(tl.where(rows == C - 1, G, 0.0), axis=0)
        read = tl.where(reads, tl.exp(G)[:, None] * scale, 0.0)
        write = tl.where(writes, tl.exp(end - G)[:, None], 0.0)
    for first in range(0, K, BK):
        b_q = load_rows(q + first, n * C, T, H * K, C, BK)
        b_k = load_rows(k + first, n * C, T, H * K, C, BK)
        if DECAY == CHANNEL:
            G = triangle_sums(triangle, load_rows(g + first, n * C, T, HV * K, C, BK))
            end = tl.sum(tl.where(rows[:, None] == C - 1, G, 0.0), axis=0)
            middle = tl.sum(tl.where(rows[:, None] == C // 2, G, 0.0), axis=0)
            strongest = tl.maximum(strongest, tl.max(-end))
            read = tl.where(reads, tl.exp(G) * scale, 0.0)
            write = tl.where(writes, tl.exp(end[None, :] - G), 0.0)
            offset = G - middle[None, :]  # clamped, for products of a steep chunk must not make NaN: it is formed anew
            by_row = (b_q * tl.exp(tl.minimum(offset, BOUND))).to(b_q.dtype)
            by_column = (b_k * tl.exp(tl.minimum(-offset, BOUND))).to(b_k.dtype)
            acc = dot(by_row, tl.trans(by_column), acc)
        else:
            acc = dot(b_q, tl.trans(b_k), acc)
        store_rows(q_read + chunk * C * K + first, b_q * read, 0, C, K, C, BK)
        store_rows(k_write + chunk * C * K + first, b_k * write, 0, C, K, C, BK)
        columns = first + tl.arange(0, BK)
        whole = tl.where(last_start < 0, tl.exp(end + tl.zeros([BK], tl.float32)), 0.0)
        tl.store(through + chunk * K + columns, whole)
    if DECAY == CHANNEL:
        tl.store(steep + chunk, strongest)
    else:
        acc *= tl.exp(tl.where(sees, G[:, None] - G[None, :], 0.0))
    store_rows(A + chunk * C * C, tl.where(sees, acc * scale, 0.0), 0, C, C, C, C)


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
        G = triangle_sums(columns[:, None] >= columns[None, :], b_g)
        b_k = load_rows(k + first, n * C, T, H * K, C, BK).to(tl.float32)
        own_q = load_rows(q + first, n * C + block, T, H * K, LEAF, BK).to(tl.float32)
        own_g = load_rows(g + first, n * C + block, T, HV * K, LEAF, BK)
        own_G = triangle_sums(own[:, None] >= own[None, :], own_g)
        own_G += tl.sum(tl.where(columns[:, None] < block, b_g, 0.0), axis=0)[None, :]
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


@triton.jit(do_not_specialize=["T", "N", "segments", "per"])
def scan(
    x, y, values, A, through, enter, out, states, leave, decay, T, N, segments, per,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    REVERSE: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Carries a state [K, BV] over the `per` chunks of a segment; one segment, head and block of values a program.

    Forward in time x is q_read, y is k_write, values is v and out is o; REVERSE, x is k_write, y is q_read, values is
    do and out is dv, and the state is the gradient of the state. Without OUTPUT only the segment's effect is computed:
    the state that it makes of zero, and its decay.

    enter [B, HV, segments, K, V] fp32; states [B, HV, N, K, V]: the state that meets each chunk (SAVE); leave: the
    state after the last segment [B, HV, K, V], or without OUTPUT after each; decay [B, HV, segments, K].
    """
    task = tl.program_id(0).to(tl.int64)
    segment, line = (task % segments).to(tl.int32), task // segments  # a line is one head of one row
    column = tl.program_id(1) * BV
    offset = (line // HV * T * HV + line % HV) * V + column
    values += offset
    out += offset
    tile = tl.arange(0, K)[:, None] * V + column + tl.arange(0, BV)[None, :]
    keys = tl.arange(0, K)

    S = tl.zeros([K, BV], tl.float32)
    if OUTPUT:
        S += tl.load(enter + task * K * V + tile)
    total = tl.full([K], 1.0, tl.float32)
    begin, end = segment * per, tl.minimum(segment * per + per, N)
    for i in range(begin, end):
        n = begin + end - 1 - i if REVERSE else i
        chunk = line * N + n
        b_y = load_rows(y + chunk * C * K, 0, C, K, C, K)
        b_v = load_rows(values, n * C, T, HV * V, C, BV)
        whole = tl.load(through + chunk * K + keys)
        if SAVE:
            tl.store(states + chunk * K * V + tile, S.to(states.dtype.element_ty))
        if OUTPUT:
            b_x = load_rows(x + chunk * C * K, 0, C, K, C, K)
            b_A = load_rows(A + chunk * C * C, 0, C, C, C, C)
            if REVERSE:
                b_A = tl.trans(b_A)
            b_o = dot(b_A, b_v, dot(b_x, S.to(b_x.dtype)))
            store_rows(out, b_o, n * C, T, HV * V, C, BV)
        else:
            total *= whole
        S = dot(tl.trans(b_y), b_v, S * whole[:, None])
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
