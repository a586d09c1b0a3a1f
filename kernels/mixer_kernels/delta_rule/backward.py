"""Triton kernels of the backward pass: `reverse_scan`, from the last chunk to the first, then `pair_gradients` and
`gradients`, all chunks in parallel.

With X = z - e~ S and R = A X as in `chunked.py`,

    dR = P^T do + k~ dS'          dz = A^T dR           dS = gamma dS' + q~^T do - e~^T dz
    dP = scale * vis (do R^T)     dT = -strictvis (dz R^T)

and everything else follows from dP, dT, the states and their gradients: neither A nor P is read again. That
dT = -dz R^T, and not -A^T dA A^T, is because dA = dR X^T.

The gradient of g_t is the sum over all that straddles t, pair by pair: reads r >= t of the state that enters the chunk,
writes s < t to the one that leaves it, pairs s < t <= r inside, and the state that passes. What does not straddle is
never in a sum that carries no decay: the usual reverse cumsum of q dq + e de - k dk, with a row's read of its own write
in it, loses what little is left under a strong decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows, sum_from_here
from mixer_kernels.delta_rule.forward import (
    BETA,
    CHANNEL,
    GROUP,
    INTO,
    SCALAR,
    STRONGEST,
    TAIL,
    TOP,
    any_steep,
    decays,
    facing,
    in_parts,
    load_erase_keys,
    load_strengths,
    load_vector,
    locate,
    pairs,
    products,
    sums,
)


@triton.jit(do_not_specialize=["T", "N", "scale", "segments", "per"])
def reverse_scan(
    q, k, e, do, A, P, vectors, gamma, enter, dz, dstates, leave, T, N, scale, segments, per,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, TIED: tl.constexpr, ENTER: tl.constexpr, LEAVE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of the state back over the chunks of a segment; a segment, head, block of values a program.

    Operands as in `scan`; enter [B, HV, segments, K, V] is the gradient of the state that leaves each segment, zeros
    without ENTER; leave [B, HV, K, V] that of the first state (LEAVE). dz [B, HV, N, V, C]; dstates [B, HV, N, V, K],
    the gradient of the state that leaves each chunk. Without OUTPUT what each segment makes of a gradient of zero,
    leave [B, HV, segments, V, K].
    """
    index = tl.program_id(0).to(tl.int64)
    task, column = index // (V // BV), index % (V // BV) * BV
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
    dS = tl.zeros([BV, K], tl.float32)
    if ENTER:
        dS += tl.load(enter + task * K * V + channels[None, :] * V + own)
    begin, end = segment * per, tl.minimum(segment * per + per, N)
    for i in range(begin, end):
        n = begin + end - 1 - i
        chunk = line * N + n
        b_q = load_rows(q + keys, n * C, limit, stride, C, K)
        b_k = load_rows(k + keys, n * C, limit, stride, C, K)
        b_A = load_rows(A + chunk * C * C, n * 0, C, C, C, C)
        b_P = load_rows(P + chunk * C * C, n * 0, C, C, C, C)
        b_do = load_rows(do + values, n * C, T, HV * V, C, BV)
        b_dS = dS.to(b_q.dtype)
        if OUTPUT:
            tl.store(dstates + chunk * V * K + own * K + channels[None, :], b_dS)
        dR = dot(b_dS, tl.trans(b_k))
        if CHANNEL_DECAY:
            b_e = load_rows(e + keys, n * C, limit, stride, C, K)
            whole = tl.load(gamma + chunk * K + channels)[None, :]
        else:
            into = tl.load(vectors + chunk * 3 * C + INTO * C + rows)
            tail = tl.load(vectors + chunk * 3 * C + TAIL * C + rows)
            beta = tl.load(vectors + chunk * 3 * C + BETA * C + rows)
            whole = tl.load(vectors + chunk * 3 * C + INTO * C + C - 1)
            dR *= tail[None, :]
        dR += dot(tl.trans(b_do), b_P)
        b_dz = dot(dR.to(b_q.dtype), b_A)
        if CHANNEL_DECAY:
            dS = dS * whole + dot(tl.trans(b_do), b_q) - dot(b_dz.to(b_q.dtype), b_e)
        else:
            read = (b_do * (into * scale)[:, None]).to(b_q.dtype)
            erased = (b_dz * (into * beta)[None, :]).to(b_q.dtype)
            b_e = b_k if TIED else load_rows(e + (batch * T * HV + head) * K, n * C, T, HV * K, C, K)
            dS = dS * whole + dot(tl.trans(read), b_q) - dot(erased, b_e)
        if OUTPUT:
            tl.store(dz + chunk * V * C + own * C + rows[None, :], b_dz.to(b_q.dtype))
    if LEAVE and not OUTPUT:
        tl.store(leave + (task * V + own) * K + channels[None, :], dS)
    elif LEAVE and segment == 0:
        tl.store(leave + line * K * V + channels[None, :] * V + own, dS)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def pair_gradients(
    v, g, beta, row_start, do, residuals, dz, dP, dT, same, dv, dbeta, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SCALAR_DECAY: tl.constexpr,
    TIED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What is summed over the value axis; one chunk of one head a program. dv [B, T, HV, V], its part of dbeta (TIED).

    dP, dT [B, HV, N, C, C] for s < r in the inputs' dtype, under a decay a head as gradients of the products without
    it; same [B, HV, N, C] fp32: dP of a row's read of its own write, on which there is no decay.
    """
    index = tl.program_id(0).to(tl.int64)
    n, batch, head, _ = locate(T, H, HV, N, index)
    line = batch * T * HV + head
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    b_beta = load_strengths(beta + line, n, T, HV, C, TIED)
    b_dP, b_dT, b_dbeta = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    for column in range(0, V, BV):
        own = index * V * C + (column + tl.arange(0, BV)[:, None]) * C + s
        b_do = load_rows(do + line * V + column, n * C, T, HV * V, C, BV)
        b_R, b_dz = tl.load(residuals + own), tl.load(dz + own)
        b_dP = dot(b_do, b_R, b_dP)
        b_dT = dot(tl.trans(b_dz), b_R, b_dT)
        turned = tl.trans(b_dz).to(tl.float32)
        if TIED:
            b_dbeta += tl.sum(turned * load_rows(v + line * V + column, n * C, T, HV * V, C, BV), axis=1)
        store_rows(dv + line * V + column, turned * b_beta[:, None], n * C, T, HV * V, C, BV)
    starts, _ = load_starts(row_start, batch, n, T, C)
    sees = (starts[:, None] <= s) & (s < r)
    tl.store(same + index * C + rows, tl.sum(tl.where(r == s, b_dP, 0.0), axis=1) * scale)
    b_dP, b_dT = tl.where(sees, b_dP * scale, 0.0), tl.where(sees, -b_dT, 0.0)
    if SCALAR_DECAY:
        decay, _, _ = decays(load_vector(g + line, n, T, HV, C), C, WIDE)
        b_dP, b_dT = b_dP * decay, b_dT * decay
    store_rows(dP + index * C * C, b_dP, n * 0, C, C, C, C)
    store_rows(dT + index * C * C, b_dT, n * 0, C, C, C, C)
    if TIED:
        tl.store(dbeta + line + (n * C + rows).to(tl.int64) * HV, b_dbeta, mask=n * C + rows < T)


@triton.jit
def through_states(
    do, states, dstates, residuals, dz, row_start, line, index, first, batch, n, T, N, scale,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of BK channels of one chunk dq, de and dk [C, BK] through the states around it, but for decay; sums of S * dS."""
    rows, channels = tl.arange(0, C), first + tl.arange(0, BK)
    dq, de, dk = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    passes = tl.zeros([BV, BK], tl.float32)
    # Whatever BV, a loop: without one, ptxas makes code of some block sizes that is wrong in the last product.
    for column in range(0, V * tl.minimum(N, 1), BV):
        own = column + tl.arange(0, BV)[:, None]
        b_do = load_rows(do + line * V + column, n * C, T, HV * V, C, BV)
        b_R = tl.load(residuals + index * V * C + own * C + rows[None, :])
        b_dz = tl.load(dz + index * V * C + own * C + rows[None, :])
        b_S = tl.load(states + index * V * K + own * K + channels[None, :])
        b_dS = tl.load(dstates + index * V * K + own * K + channels[None, :])
        dq = dot(b_do, b_S, dq)
        de = dot(tl.trans(b_dz), b_S, de)
        dk = dot(tl.trans(b_R), b_dS, dk)
        passes += b_S.to(tl.float32) * b_dS
    starts, last_start = load_starts(row_start, batch, n, T, C)
    reads, writes = (starts < 0)[:, None], (last_start <= rows)[:, None]
    dq, de, dk = tl.where(reads, dq * scale, 0.0), tl.where(reads, -de, 0.0), tl.where(writes, dk, 0.0)
    return dq, de, dk, tl.sum(passes, axis=0)


@triton.jit
def store_gradients(
    dq, dk, de, dbeta, b_dq, b_dk, b_de, b_q, b_k, b_beta, same, index, line, first, part, n, T,
    HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    """dq and dk of BK channels, with what a row's read of its own write adds, and their part of dbeta or their de."""
    rows = tl.arange(0, C)
    b_same = tl.load(same + index * C + rows)[:, None]
    b_dk += b_same * b_q
    if TIED:
        at = (first // BK + 1).to(tl.int64) * part + line + (n * C + rows).to(tl.int64) * HV
        tl.store(dbeta + at, tl.sum(b_k * b_de, axis=1), mask=n * C + rows < T)
        b_dk += b_de * b_beta[:, None]
    else:
        store_rows(de + line * K + first, b_de, n * C, T, HV * K, C, BK)
    store_rows(dq + line * K + first, b_dq + b_same * b_k, n * C, T, HV * K, C, BK)
    store_rows(dk + line * K + first, b_dk, n * C, T, HV * K, C, BK)


@triton.jit(do_not_specialize=["T", "N", "scale", "part"])
def gradients(
    q, k, e, g, beta, row_start, triangle, gamma, halves, steep, do, states, dstates, residuals, dz, dP, dT, same, dq,
    dk, de, dg, dbeta, T, N, scale, part,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, TIED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head and BK channels a program; under channel decay none of the steep chunks.

    dq, dk and, unless TIED, de [B, T, HV, K]; else dbeta [1 + K // BK, B, T, HV], and under scalar decay dg
    [K // BK, B, T, HV]: a part for each block of channels, `part` apart; under channel decay dg [B, T, HV, K].
    """
    first = tl.program_id(0) % (K // BK) * BK
    index = tl.program_id(0).to(tl.int64) // (K // BK)
    if DECAY == CHANNEL:  # noqa: SIM102 (the compiler's condition: nothing else is loaded)
        if tl.load(steep + index) > 0:
            return
    n, batch, head, keys = locate(T, H, HV, N, index)
    line = batch * T * HV + head
    b_dq, b_de, b_dk, passes = through_states(
        do, states, dstates, residuals, dz, row_start, line, index, first, batch, n, T, N, scale, HV, K, BK, V, BV, C
    )
    rows = tl.arange(0, C)
    r = rows[:, None]
    b_beta = load_strengths(beta + line, n, T, HV, C, TIED)
    b_q = load_rows(q + keys * K + first, n * C, T, H * K, C, BK)
    b_k = load_rows(k + keys * K + first, n * C, T, H * K, C, BK)
    b_e = load_erase_keys(e + line * K + first, b_k, b_beta, n, T, HV, K, BK, C, TIED)
    if DECAY == CHANNEL:
        # As in `prepare_channel`: by_row and by_column lead to and from the middle of the chunk.
        b_triangle = load_rows(triangle, n * 0, C, C, C, C)
        b_g = load_rows(g + line * K + first, n * C, T, HV * K, C, BK)
        high, low = in_parts(tl.maximum(b_g, STRONGEST), b_k.dtype)
        sides = halves + index * 2 * K + first + tl.arange(0, BK)
        until, after = tl.load(sides), tl.load(sides + K)
        G = products(b_triangle, high, low) - until[None, :]
        by_row, by_column = tl.exp(G), tl.exp(-G)
        until, after = tl.exp(until), tl.exp(after)
        b_dq, b_de, b_dk = b_dq * until[None, :], b_de * until[None, :], b_dk * after[None, :]
        to_q, to_k = (b_q * by_row).to(b_q.dtype), (b_k * by_column).to(b_q.dtype)
        to_e = (b_e * by_row).to(b_q.dtype)
        whole = tl.load(gamma + index * K + first + tl.arange(0, BK))
    else:
        to_q, to_k, to_e = b_q, b_k, b_e.to(b_q.dtype)
    if DECAY == SCALAR:
        _, into, tail = decays(load_vector(g + line, n, T, HV, C), C, WIDE)
        b_dq, b_de, b_dk = b_dq * into[:, None], b_de * into[:, None], b_dk * tail[:, None]
        last_start = tl.load(row_start + batch * T + tl.minimum(n * C + C - 1, T - 1)) - n * C
        whole = tl.where(last_start < 0, tl.sum(tl.where(rows == C - 1, into, 0.0), axis=0), 0.0)
    # Of the writes to the outgoing state those of rows s < t count for g of row t: all, less those from t on. That of
    # the last row, alone not decayed, counts for none: it must not drown the others.
    counts = (r < C - 1) & (n * C + r < T - 1)
    if DECAY > 0:
        everywhere = tl.sum(tl.where(counts, to_k * b_dk, 0.0), axis=0) + whole * passes
    # Of pairs s < t <= r count for g of row t: rows r >= t less columns s >= t. Both are formed from the operands as
    # rounded, so that the rest cancels but for fp32's rounding.
    b_dP = load_rows(dP + index * C * C, n * 0, C, C, C, C)
    b_dT = load_rows(dT + index * C * C, n * 0, C, C, C, C)
    b_dq, b_de = dot(b_dP, to_k, b_dq), dot(b_dT, to_k, b_de)
    b_dk = dot(tl.trans(b_dT), to_e, dot(tl.trans(b_dP), to_q, b_dk))
    if DECAY > 0:
        from_here = to_q * b_dq + to_e * b_de - tl.where(counts, to_k * b_dk, 0.0)
    if DECAY == SCALAR:
        b_dg = sum_from_here(tl.sum(from_here, axis=1)) + tl.sum(everywhere, axis=0)
        at = (first // BK).to(tl.int64) * part + line + (n * C + rows).to(tl.int64) * HV
        tl.store(dg + at, b_dg, mask=n * C + rows < T)
    if DECAY == CHANNEL:
        high, low = in_parts(from_here, b_k.dtype)
        b_dg = products(tl.trans(b_triangle), high, low) + everywhere[None, :]
        store_rows(dg + line * K + first, b_dg, n * C, T, HV * K, C, BK)
        b_dq, b_de, b_dk = b_dq * by_row, b_de * by_row, b_dk * by_column
    store_gradients(
        dq, dk, de, dbeta, b_dq, b_dk, b_de, b_q, b_k, b_beta, same, index, line, first, part, n, T, HV, K, BK, C, TIED
    )


@triton.jit(do_not_specialize=["T", "N", "scale", "part", "chunks"])
def gradients_steep(
    q, k, e, g, beta, row_start, gamma, steep, do, states, dstates, residuals, dz, dP, dT, same, dq, dk, de, dg, dbeta,
    T, N, scale, part, chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, TIED: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """`gradients` of the steep ones of GROUP chunks, pairs by halving as in `prepare_steep`."""
    first, begin = tl.program_id(0) % (K // BK) * BK, tl.program_id(0) // (K // BK) * GROUP
    if any_steep(steep, begin, chunks):
        for i in range(begin, tl.minimum(begin + GROUP, chunks)):
            if tl.load(steep + i) > 0:
                steep_gradients(
                    q, k, e, g, beta, row_start, gamma, do, states, dstates, residuals, dz, dP, dT, same, dq, dk, de,
                    dg, dbeta, T, N, scale, part, i + tl.zeros([], tl.int64), first, H, HV, K, BK, V, BV, C, TIED, LEAF,
                )  # fmt: skip


@triton.jit
def steep_gradients(
    q, k, e, g, beta, row_start, gamma, do, states, dstates, residuals, dz, dP, dT, same, dq, dk, de, dg, dbeta,
    T, N, scale, part, index, first,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, TIED: tl.constexpr, LEAF: tl.constexpr,
):  # fmt: skip
    """BK channels of chunk `index`."""
    n, batch, head, keys = locate(T, H, HV, N, index)
    line = batch * T * HV + head
    b_dq, b_de, b_dk, passes = through_states(
        do, states, dstates, residuals, dz, row_start, line, index, first, batch, n, T, N, scale, HV, K, BK, V, BV, C
    )
    rows = tl.arange(0, C)
    r, s = rows[:, None], rows[None, :]
    b_beta = load_strengths(beta + line, n, T, HV, C, TIED)
    b_q = load_rows(q + keys * K + first, n * C, T, H * K, C, BK)
    b_k = load_rows(k + keys * K + first, n * C, T, H * K, C, BK)
    b_e = load_erase_keys(e + line * K + first, b_k, b_beta, n, T, HV, K, BK, C, TIED)
    b_g = load_rows(g + line * K + first, n * C, T, HV * K, C, BK)
    b_dP = load_rows(dP + index * C * C, n * 0, C, C, C, C)
    b_dT = load_rows(dT + index * C * C, n * 0, C, C, C, C)
    high, low = in_parts(tl.maximum(b_g, STRONGEST), b_k.dtype)
    into, after = tl.exp(sums(s <= r, high, low)), tl.exp(sums(s > r, high, low))
    b_dq, b_de, b_dk = b_dq * into, b_de * into, b_dk * after
    by_write = tl.where((r < C - 1) & (n * C + r < T - 1), b_k * b_dk, 0.0)
    everywhere = tl.sum(by_write, axis=0) + tl.load(gamma + index * K + first + tl.arange(0, BK)) * passes
    from_here = b_q * b_dq + b_e * b_de - by_write
    level = TOP
    while level >= LEAF:
        chosen, by_row, by_column = pairs(sums(facing(level, C), high, low), level, LEAF, C)
        right = (b_k * by_column).to(q.dtype.element_ty)
        pair, left = tl.where(chosen, b_dP, 0.0).to(q.dtype.element_ty), (b_q * by_row).to(q.dtype.element_ty)
        on_row, on_column = dot(pair, right), dot(tl.trans(pair), left)
        b_dq, b_dk = b_dq + by_row * on_row, b_dk + by_column * on_column
        from_here += left * on_row - right * on_column
        pair, left = tl.where(chosen, b_dT, 0.0).to(q.dtype.element_ty), (b_e * by_row).to(q.dtype.element_ty)
        on_row, on_column = dot(pair, right), dot(tl.trans(pair), left)
        b_de, b_dk = b_de + by_row * on_row, b_dk + by_column * on_column
        from_here += left * on_row - right * on_column
        level -= 1
    high, low = in_parts(from_here, b_k.dtype)
    b_dg = sums(r <= s, high, low) + everywhere[None, :]
    store_rows(dg + line * K + first, b_dg, n * C, T, HV * K, C, BK)
    store_gradients(
        dq, dk, de, dbeta, b_dq, b_dk, b_de, b_q, b_k, b_beta, same, index, line, first, part, n, T, HV, K, BK, C, TIED
    )
