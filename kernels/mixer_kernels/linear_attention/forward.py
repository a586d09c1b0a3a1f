"""Triton kernels: the scores inside chunks, and the scan over chunks that also writes the output.

`scores` forms for every chunk in parallel all that depends on gates and boundaries; under channel decay `scores_steep`
redoes the chunks whose decay is too strong for one product. `scan` then knows of neither: it carries the state from
chunk to chunk. Run backwards in time, with queries and keys exchanged, it gives the gradients of states and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows

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
    q, k, g, row_start, A, read, write, through, steep, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One chunk of one head a program.

    A [B, HV, N, C, C]: scale * q[r] . k[s] under the decay between them, where r sees s. Under channel decay read and
    write [B, HV, N * C, K]: q under the decay from the chunk's start (and scale), k under the decay to its end, zero in
    rows that do not read the incoming or write the outgoing state; else [B, HV, N * C]: those factors alone, fp32.
    through [B, HV, N, K or 1]: the decay of the whole chunk, zero if a document begins in it; steep [B, HV, N]: the
    strongest decay of a channel, as a positive number.
    """
    chunk = tl.program_id(0).to(tl.int64)
    n, head, batch = (chunk % N).to(tl.int32), chunk // N % HV, chunk // N // HV
    starts, last_start = load_starts(row_start, batch, n, T, C)
    rows = tl.arange(0, C)
    reads, writes = starts < 0, last_start <= rows
    sees = (starts[:, None] <= rows[None, :]) & (rows[None, :] <= rows[:, None])
    tokens = batch * T
    q += (tokens * H + head // (HV // H)) * K
    k += (tokens * H + head // (HV // H)) * K
    g += tokens * HV * K + head * K if DECAY == CHANNEL else tokens * HV + head
    acc = tl.zeros([C, C], tl.float32)
    strongest = 0.0
    for first in range(0, K, BK):
        b_q = load_rows(q + first, n * C, T, H * K, C, BK)
        b_k = load_rows(k + first, n * C, T, H * K, C, BK)
        if DECAY == CHANNEL:
            G = tl.cumsum(load_rows(g + first, n * C, T, HV * K, C, BK), axis=0)
            end = tl.sum(tl.where(rows[:, None] == C - 1, G, 0.0), axis=0)
            middle = tl.sum(tl.where(rows[:, None] == C // 2, G, 0.0), axis=0)
            strongest = tl.maximum(strongest, tl.max(-end))
            offset = G - middle[None, :]  # clamped, for products of a steep chunk must not make NaN: it is formed anew
            by_row = (b_q * tl.exp(tl.minimum(offset, BOUND))).to(b_q.dtype)
            by_column = (b_k * tl.exp(tl.minimum(-offset, BOUND))).to(b_k.dtype)
            acc = dot(by_row, tl.trans(by_column), acc)
            b_read = tl.where(reads[:, None], b_q * tl.exp(G) * scale, 0.0)
            b_write = tl.where(writes[:, None], b_k * tl.exp(end[None, :] - G), 0.0)
            store_rows(read + chunk * C * K + first, b_read, 0, C, K, C, BK)
            store_rows(write + chunk * C * K + first, b_write, 0, C, K, C, BK)
            whole = tl.where(last_start < 0, tl.exp(end), 0.0)
            tl.store(through + chunk * K + first + tl.arange(0, BK), whole)
        else:
            acc = dot(b_q, tl.trans(b_k), acc)
    if DECAY == CHANNEL:
        tl.store(steep + chunk, strongest)
    else:
        b_g = load_gates(g, n, T, HV, DECAY, C)
        G, end = tl.cumsum(b_g, axis=0), tl.sum(b_g, axis=0)
        acc *= tl.exp(tl.where(sees, G[:, None] - G[None, :], 0.0))
        tl.store(read + chunk * C + rows, tl.where(reads, tl.exp(G) * scale, 0.0))
        tl.store(write + chunk * C + rows, tl.where(writes, tl.exp(tl.minimum(end - G, 0.0)), 0.0))
        tl.store(through + chunk, tl.where(last_start < 0, tl.exp(end), 0.0))
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
        G = tl.cumsum(b_g, axis=0)
        b_k = load_rows(k + first, n * C, T, H * K, C, BK).to(tl.float32)
        own_q = load_rows(q + first, n * C + block, T, H * K, LEAF, BK).to(tl.float32)
        own_g = load_rows(g + first, n * C + block, T, HV * K, LEAF, BK)
        own_G = tl.cumsum(own_g, axis=0)
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
    x, y, on_out, on_values, values, A, through, enter, out, states, leave, decay, T, N, segments, per,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, REVERSE: tl.constexpr, ENTER: tl.constexpr, LEAVE: tl.constexpr,
    OUTPUT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Carries a state over the `per` chunks of a segment; one segment, head and block of values a program.

    The state is held as its transpose [BV, K]: so it is the left operand of its product with the queries, which the
    tensor cores take from registers. Forward in time x is q, y is k, values is v and out is o; REVERSE, x is k, y is q,
    values is do and out is dv, and the state is the gradient of the state. Under channel decay q and k are `read` and
    `write` of `scores`; else on_out and on_values are those factors of rows. Without OUTPUT only the segment's effect
    is computed: the state that it makes of zero, and its decay.

    enter [B, HV, segments, K, V] fp32, zeros without ENTER; states [B, HV, N, V, K]: the state that meets each chunk
    (SAVE); leave (LEAVE): the state after the last segment [B, HV, K, V], or without OUTPUT after each; decay
    [B, HV, segments, K].
    """
    index = tl.program_id(0).to(tl.int64)
    task, column = index // (V // BV), index % (V // BV) * BV  # a head's blocks of values side by side, for the cache
    segment, line = (task % segments).to(tl.int32), task // segments  # a line is one head of one row
    head, batch = line % HV, line // HV
    values += (batch * T * HV + head) * V + column
    out += (batch * T * HV + head) * V + column
    stride: tl.constexpr = K if CHANNEL_DECAY else H * K
    keys = line * N * C * K if CHANNEL_DECAY else (batch * T * H + head // (HV // H)) * K
    channels, rows = tl.arange(0, K), tl.arange(0, C)
    x_tile = rows[:, None] * stride + channels[None, :]
    v_tile = rows[:, None] * (HV * V) + tl.arange(0, BV)[None, :]
    A_tile = rows[:, None] * C + rows[None, :]
    own = column + tl.arange(0, BV)[:, None]
    tile = channels[None, :] * V + own

    S = tl.zeros([BV, K], tl.float32)
    if ENTER:
        S += tl.load(enter + task * K * V + tile)
    total = tl.full([K], 1.0, tl.float32)
    begin, end = segment * per, tl.minimum(segment * per + per, N)
    chunk = line * N + (end - 1 if REVERSE else begin)
    if CHANNEL_DECAY:
        whole = tl.load(through + chunk * K + channels)
    else:
        whole = tl.load(through + chunk)
        into = tl.load(on_out + chunk * C + rows)
    for i in range(begin, end):
        n = begin + end - 1 - i if REVERSE else i
        chunk = line * N + n
        first = tl.cast(n * C, tl.int64)
        inside = (n * C + rows < T)[:, None]
        b_y = tl.load(y + keys + first * stride + x_tile, mask=inside, other=0.0)
        b_v = tl.trans(tl.load(values + first * (HV * V) + v_tile, mask=inside, other=0.0))
        # What is needed next time around is asked for now: only operands of products are loaded ahead by the compiler.
        after = line * N + (tl.maximum(n - 1, begin) if REVERSE else tl.minimum(n + 1, end - 1))
        if CHANNEL_DECAY:
            next_whole = tl.load(through + after * K + channels)
        else:
            next_whole = tl.load(through + after)
            next_into = tl.load(on_out + after * C + rows)
        if SAVE:
            tl.store(states + chunk * V * K + own * K + channels[None, :], S.to(states.dtype.element_ty))
        if OUTPUT:
            b_x = tl.load(x + keys + first * stride + x_tile, mask=inside, other=0.0)
            b_A = tl.load(A + chunk * C * C + A_tile)
            b_o = dot(S.to(b_x.dtype), tl.trans(b_x))
            if not CHANNEL_DECAY:
                b_o *= into[None, :]
            b_o = dot(b_v, b_A if REVERSE else tl.trans(b_A), b_o)
            tl.store(out + first * (HV * V) + v_tile, tl.trans(b_o).to(out.dtype.element_ty), mask=inside)
        else:
            total *= whole
        if CHANNEL_DECAY:
            S *= whole[None, :]
        else:
            S *= whole
            b_v = (b_v * tl.load(on_values + chunk * C + rows)[None, :]).to(b_y.dtype)
            into = next_into
        S = dot(b_v, b_y, S)
        whole = next_whole
    if not OUTPUT:
        tl.store(leave + task * K * V + tile, S)
        if column == 0:
            tl.store(decay + task * K + channels, total)
    elif LEAVE:
        last = 0 if REVERSE else segments - 1
        if segment == last:
            tl.store(leave + line * K * V + tile, S)


@triton.jit(do_not_specialize=["segments"])
def prefix(
    decay, made, first, enter, segments,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The state that enters each segment, from what each makes of zero and its decay; a block of values a program.

    decay [B, HV, segments, K], made and enter [B, HV, segments, K, V], first [B, HV, K, V], zeros without FIRST.
    """
    line = tl.program_id(0).to(tl.int64)
    keys = tl.arange(0, K)
    tile = keys[:, None] * V + tl.program_id(1) * BV + tl.arange(0, BV)[None, :]
    S = tl.zeros([K, BV], tl.float32)
    if FIRST:
        S += tl.load(first + line * K * V + tile)
    for i in range(segments):
        segment = line * segments + (segments - 1 - i if REVERSE else i)
        tl.store(enter + segment * K * V + tile, S)
        S = S * tl.load(decay + segment * K + keys)[:, None] + tl.load(made + segment * K * V + tile)
