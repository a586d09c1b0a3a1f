"""Triton kernels: the gradients of q, k and g of each chunk, once the scan has run backwards in time."""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows, sum_before, sum_from_here
from mixer_kernels.linear_attention.forward import BOUND, CHANNEL, LEAF, NONE, SCALAR, load_gates


@triton.jit(do_not_specialize=["T", "N", "scale"])
def gradients(
    q, k, v, g, row_start, do, states, dstates, steep, dq, dk, dg, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, HV, K] and dg of one chunk of one head and a block of BK keys.

    states, dstates [B, HV, N, V, K]: the state entering each chunk and the gradient of the state leaving it. dg is
    [B, T, HV, K], or [K / BK, B, T, HV] partial sums under scalar decay. Pairs inside steep chunks are left out.
    """
    chunk = tl.program_id(0).to(tl.int64)
    n, head, batch = (chunk % N).to(tl.int32), chunk // N % HV, chunk // N // HV
    first = tl.program_id(1) * BK
    starts, last_start = load_starts(row_start, batch, n, T, C)
    rows, tokens = tl.arange(0, C), batch * T
    values = (tokens * HV + head) * V
    tile = tl.arange(0, BV)[:, None] * K + tl.arange(0, BK)[None, :]

    dA = tl.zeros([C, C], tl.float32)
    dq_read = tl.zeros([C, BK], tl.float32)
    dk_write = tl.zeros([C, BK], tl.float32)
    both = tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        b_do = load_rows(do + values + column, n * C, T, HV * V, C, BV)
        b_v = load_rows(v + values + column, n * C, T, HV * V, C, BV)
        b_S = tl.load(states + (chunk * V + column) * K + first + tile)
        b_dS = tl.load(dstates + (chunk * V + column) * K + first + tile)
        dA += dot(b_do, tl.trans(b_v))
        dq_read += dot(b_do, b_S)
        dk_write += dot(b_v, b_dS)
        if DECAY != NONE:
            both += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)

    keys = (tokens * H + head // (HV // H)) * K + first
    b_q = load_rows(q + keys, n * C, T, H * K, C, BK)
    b_k = load_rows(k + keys, n * C, T, H * K, C, BK)
    dA *= scale
    own = tl.sum(tl.where(rows[:, None] == rows[None, :], dA, 0.0), axis=1)[:, None]  # under no decay: kept out of dg
    sees = (starts[:, None] <= rows[None, :]) & (rows[None, :] < rows[:, None])
    reads, writes = (starts < 0)[:, None], (last_start <= rows)[:, None]
    grads = (tokens * HV + head) * K + first
    # Queries first, then keys: fewer tiles at a time. `straddle` adds up what decays between a row and a later one.
    if DECAY == CHANNEL:
        G = tl.cumsum(load_rows(g + grads, n * C, T, HV * K, C, BK), axis=0)
        end = tl.sum(tl.where(rows[:, None] == C - 1, G, 0.0), axis=0)
        middle = tl.sum(tl.where(rows[:, None] == C // 2, G, 0.0), axis=0)[None, :]
        a = tl.where(sees, dA, 0.0)
        a = tl.where(tl.load(steep + chunk) <= BOUND, a, 0.0).to(b_q.dtype)
        by_row, by_column = tl.exp(tl.minimum(G - middle, BOUND)), tl.exp(tl.minimum(middle - G, BOUND))
        # The very operands of the products, rounded: what does not straddle a row then cancels to fp32 rounding.
        row_side, column_side = (b_q * by_row).to(b_q.dtype), (b_k * by_column).to(b_q.dtype)
        on_rows = dot(a, column_side)
        dq_read = tl.where(reads, dq_read * tl.exp(G) * scale, 0.0)
        straddle = row_side * on_rows + b_q * dq_read
        store_rows(dq + grads, by_row * on_rows + own * b_k + dq_read, n * C, T, HV * K, C, BK)
        on_columns = dot(tl.trans(a), row_side)
        dk_write = tl.where(writes, dk_write * tl.exp(end[None, :] - G), 0.0)
        store_rows(dk + grads, by_column * on_columns + own * b_q + dk_write, n * C, T, HV * K, C, BK)
        through = tl.where(last_start < 0, tl.exp(end), 0.0)
        b_dg = sum_from_here(straddle - column_side * on_columns) + (through * both)[None, :]
        store_rows(dg + grads, b_dg + sum_before(b_k * dk_write), n * C, T, HV * K, C, BK)
    else:
        b_g = load_gates(g + tokens * HV + head, n, T, HV, DECAY, C)
        G, end = tl.cumsum(b_g, axis=0), tl.sum(b_g, axis=0)
        a = (dA * tl.exp(tl.where(sees, G[:, None] - G[None, :], float("-inf")))).to(b_q.dtype)
        dq_read *= tl.where(reads, tl.exp(G)[:, None] * scale, 0.0)
        dq_decayed = dot(a, b_k) + dq_read
        straddle = tl.sum(b_q * dq_decayed, axis=1)
        store_rows(dq + grads, dq_decayed + own * b_k, n * C, T, HV * K, C, BK)
        dk_pairs = dot(tl.trans(a), b_q)
        dk_write *= tl.where(writes, tl.exp(tl.minimum(end - G, 0.0))[:, None], 0.0)
        store_rows(dk + grads, dk_pairs + own * b_q + dk_write, n * C, T, HV * K, C, BK)
        if DECAY == SCALAR:
            through = tl.where(last_start < 0, tl.exp(end), 0.0)
            b_dg = sum_from_here(straddle - tl.sum(b_k * dk_pairs, axis=1)) + through * tl.sum(both, axis=0)
            b_dg += sum_before(tl.sum(b_k * dk_write, axis=1))
            part = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // N) * T
            inside = n * C + rows < T
            tl.store(dg + part + tokens * HV + head + (n * C + rows).to(tl.int64) * HV, b_dg, mask=inside)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def gradients_steep(
    q, k, v, g, row_start, do, steep, dq, dk, dg, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Adds to dq, dk and dg the pairs inside the chunks that `scores` found steep, by the tiles of `scores_steep`.

    A chunk of a head and a block of keys a program. LEAF rows at a time, last first: they are the rows of the squares
    before them and the columns of the squares after them.
    """
    chunk = tl.program_id(0).to(tl.int64)
    if tl.load(steep + chunk) <= BOUND:
        return
    n, head, batch = (chunk % N).to(tl.int32), chunk // N % HV, chunk // N // HV
    first = tl.program_id(1) * BK
    starts, _ = load_starts(row_start, batch, n, T, C)
    all_rows, leaf, tokens = tl.arange(0, C), tl.arange(0, LEAF), batch * T
    v += (tokens * HV + head) * V
    do += (tokens * HV + head) * V
    q += (tokens * H + head // (HV // H)) * K + first
    k += (tokens * H + head // (HV // H)) * K + first
    g += (tokens * HV + head) * K + first
    grads = (tokens * HV + head) * K + first
    b_q = load_rows(q, n * C, T, H * K, C, BK).to(tl.float32)
    b_k = load_rows(k, n * C, T, H * K, C, BK).to(tl.float32)
    b_g = load_rows(g, n * C, T, HV * K, C, BK)
    G = tl.cumsum(b_g, axis=0)
    below = tl.zeros([BK], tl.float32)  # what straddles from the rows below
    for step in range(C // LEAF):
        block = C - LEAF - step * LEAF
        rows = block + leaf
        own_starts = tl.load(row_start + tokens + tl.minimum(n * C + rows, T - 1)) - n * C
        a_rows = tl.zeros([LEAF, C], tl.float32)  # own rows against all columns
        a_columns = tl.zeros([LEAF, C], tl.float32)  # own columns (first axis) against all rows
        for column in range(0, V, BV):
            own_do = load_rows(do + column, n * C + block, T, HV * V, LEAF, BV)
            own_v = load_rows(v + column, n * C + block, T, HV * V, LEAF, BV)
            a_rows += dot(own_do, tl.trans(load_rows(v + column, n * C, T, HV * V, C, BV)))
            a_columns += dot(own_v, tl.trans(load_rows(do + column, n * C, T, HV * V, C, BV)))
        seen = (own_starts[:, None] <= all_rows[None, :]) & (all_rows[None, :] < rows[:, None])
        seeing = (starts[None, :] <= rows[:, None]) & (rows[:, None] < all_rows[None, :])
        a_rows = tl.where(seen, a_rows * scale, 0.0)
        a_columns = tl.where(seeing, a_columns * scale, 0.0)

        own_q = load_rows(q, n * C + block, T, H * K, LEAF, BK).to(tl.float32)
        own_k = load_rows(k, n * C + block, T, H * K, LEAF, BK).to(tl.float32)
        own_g = load_rows(g, n * C + block, T, HV * K, LEAF, BK)
        own_G = tl.cumsum(own_g, axis=0)
        own_G += tl.sum(tl.where(all_rows[:, None] < block, b_g, 0.0), axis=0)[None, :]
        b_dq = tl.zeros([LEAF, BK], tl.float32)
        b_dk = tl.zeros([LEAF, BK], tl.float32)
        straddle = tl.zeros([LEAF, BK], tl.float32)
        for level in tl.static_range(2):
            half = LEAF << level
            base = block // (2 * half) * (2 * half)
            late = block >= base + half  # own rows are the square's rows; else they are its columns
            partner = tl.where(late, base, base + half)
            inside = (partner <= all_rows) & (all_rows < partner + half)
            corner = tl.sum(tl.where(all_rows[:, None] < base + half, b_g, 0.0), axis=0)[None, :]
            by_own = tl.exp(tl.minimum(tl.where(late, own_G - corner, corner - own_G), 0.0))
            exponent = tl.minimum(tl.where(late, corner - G, G - corner), 0.0)
            by_other = tl.exp(tl.where(inside[:, None], exponent, float("-inf")))
            other = (tl.where(late, b_k, b_q) * by_other).to(do.dtype.element_ty)
            sums = dot(tl.where(late, a_rows, a_columns).to(do.dtype.element_ty), other)
            own_side = (tl.where(late, own_q, own_k) * by_own).to(do.dtype.element_ty).to(tl.float32)
            straddle += tl.where(late, own_side * sums, -own_side * sums)
            b_dq += tl.where(late, by_own * sums, 0.0)
            b_dk += tl.where(late, 0.0, by_own * sums)
        for j in range(LEAF):
            k_j = tl.sum(tl.where(leaf[:, None] == j, own_k, 0.0), axis=0)[None, :]
            G_j = tl.sum(tl.where(leaf[:, None] == j, own_G, 0.0), axis=0)[None, :]
            a_j = tl.sum(tl.where(all_rows[None, :] == block + j, a_rows, 0.0), axis=1)[:, None]
            decayed = a_j * tl.exp(tl.minimum(own_G - G_j, 0.0))
            on_j = tl.sum(decayed * own_q, axis=0)[None, :]
            b_dq += decayed * k_j
            b_dk += tl.where(leaf[:, None] == j, on_j, 0.0)
            straddle += decayed * k_j * own_q - tl.where(leaf[:, None] == j, on_j * k_j, 0.0)

        b_dq += load_rows(dq + grads, n * C + block, T, HV * K, LEAF, BK)
        b_dk += load_rows(dk + grads, n * C + block, T, HV * K, LEAF, BK)
        b_dg = load_rows(dg + grads, n * C + block, T, HV * K, LEAF, BK) + below[None, :]
        b_dg += sum_from_here(straddle)
        store_rows(dq + grads, b_dq, n * C + block, T, HV * K, LEAF, BK)
        store_rows(dk + grads, b_dk, n * C + block, T, HV * K, LEAF, BK)
        store_rows(dg + grads, b_dg, n * C + block, T, HV * K, LEAF, BK)
        below += tl.sum(straddle, axis=0)
