"""Triton kernels of the backward pass: `reverse_scan`, from the last chunk to the first, then `gradients`, all chunks
in parallel.

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

from mixer_kernels.common.tiles import dot, load_rows, load_starts, store_rows, sum_before, sum_from_here
from mixer_kernels.delta_rule.forward import (
    BETA,
    CHANNEL,
    INTO,
    SCALAR,
    STRONGEST,
    TAIL,
    TOP,
    decays,
    facing,
    in_parts,
    load_vector,
    locate,
    pairs,
    running,
    sums,
)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def reverse_scan(
    q, k, e, do, A, P, vectors, gamma, enter, dz, dstates, leave, T, N, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
):  # fmt: skip
    """Carries the gradient of the state back over the chunks; one head and block of values a program.

    Operands as in `scan`; enter [B, HV, K, V] is the gradient of the last state, leave that of the first. dz
    [B, HV, N, V, C]; dstates [B, HV, N, V, K], the gradient of the state that leaves each chunk.
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
    dS = tl.load(enter + line * K * V + channels[None, :] * V + own)
    for i in range(0, N):
        n = N - 1 - i
        index = line * N + n
        b_q = load_rows(q + keys, n * C, limit, stride, C, K)
        b_k = load_rows(k + keys, n * C, limit, stride, C, K)
        b_A = load_rows(A + index * C * C, n * 0, C, C, C, C)
        b_P = load_rows(P + index * C * C, n * 0, C, C, C, C)
        b_do = load_rows(do + values, n * C, T, HV * V, C, BV)
        b_dS = dS.to(b_q.dtype)
        tl.store(dstates + index * V * K + own * K + channels[None, :], b_dS)
        dR = dot(b_dS, tl.trans(b_k))
        if CHANNEL_DECAY:
            b_e = load_rows(e + keys, n * C, limit, stride, C, K)
            whole = tl.load(gamma + index * K + channels)[None, :]
        else:
            into = tl.load(vectors + index * 3 * C + INTO * C + rows)
            tail = tl.load(vectors + index * 3 * C + TAIL * C + rows)
            beta = tl.load(vectors + index * 3 * C + BETA * C + rows)
            whole = tl.load(vectors + index * 3 * C + INTO * C + C - 1)
            dR *= tail[None, :]
        dR += dot(tl.trans(b_do), b_P)
        b_dz = dot(dR.to(b_q.dtype), b_A)
        if CHANNEL_DECAY:
            dS = dS * whole + dot(tl.trans(b_do), b_q) - dot(b_dz.to(b_q.dtype), b_e)
        else:
            read = (b_do * (into * scale)[:, None]).to(b_q.dtype)
            erased = (b_dz * (into * beta)[None, :]).to(b_q.dtype)
            dS = dS * whole + dot(tl.trans(read), b_q) - dot(erased, b_k)
        tl.store(dz + index * V * C + own * C + rows[None, :], b_dz.to(b_q.dtype))
    tl.store(leave + line * K * V + channels[None, :] * V + own, dS)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def gradients(
    q, k, v, g, beta, row_start, gamma, do, states, dstates, residuals, dz, dq, dk, dv, dg, dbeta, T, N, scale, part,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head and BK channels a program. dq, dk [B, T, HV, K]; dv [B, T, HV, V].

    dbeta and (none or scalar decay) dg [K // BK, B, T, HV]: a part for each block of channels, `part` apart; under
    channel decay dg [B, T, HV, K].
    """
    first = tl.program_id(0) % (K // BK) * BK
    index = tl.program_id(0).to(tl.int64) // (K // BK)
    n, batch, head, keys = locate(T, H, HV, N, index)
    line = batch * T * HV + head
    rows = tl.arange(0, C)
    columns, channels = tl.arange(0, BV), first + tl.arange(0, BK)
    b_beta = load_vector(beta + line, n, T, HV, C)
    starts, last_start = load_starts(row_start, batch, n, T, C)
    b_q = load_rows(q + keys * K + first, n * C, T, H * K, C, BK)
    b_k = load_rows(k + keys * K + first, n * C, T, H * K, C, BK)
    if DECAY == CHANNEL:
        b_g = load_rows(g + line * K + first, n * C, T, HV * K, C, BK)

    dP, dT = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    b_dq, b_dk, b_de = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    b_dbeta, passes = tl.zeros([C], tl.float32), tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        own = column + columns[:, None]
        b_do = load_rows(do + line * V + column, n * C, T, HV * V, C, BV)
        b_v = load_rows(v + line * V + column, n * C, T, HV * V, C, BV)
        b_R = tl.load(residuals + index * V * C + own * C + rows[None, :])
        b_dz = tl.load(dz + index * V * C + own * C + rows[None, :])
        b_S = tl.load(states + index * V * K + own * K + channels[None, :])
        b_dS = tl.load(dstates + index * V * K + own * K + channels[None, :])
        dP += dot(b_do, b_R)
        dT -= dot(tl.trans(b_dz), b_R)
        b_dq += dot(b_do, b_S)
        b_de -= dot(tl.trans(b_dz), b_S)
        b_dk += dot(tl.trans(b_R), b_dS)
        if DECAY > 0:
            passes += tl.sum(b_S.to(tl.float32) * b_dS, axis=0)
        if first == 0:
            turned = tl.trans(b_dz).to(tl.float32)
            b_dbeta += tl.sum(turned * b_v, axis=1)
            store_rows(dv + line * V + column, turned * b_beta[:, None], n * C, T, HV * V, C, BV)

    r, s = rows[:, None], rows[None, :]
    sees = (starts[:, None] <= s) & (s <= r)
    reads, writes = (starts < 0)[:, None], (last_start <= rows)[:, None]
    dP, dT = tl.where(sees, dP * scale, 0.0), tl.where(sees & (s < r), dT, 0.0)
    b_dq, b_de, b_dk = tl.where(reads, b_dq * scale, 0.0), tl.where(reads, b_de, 0.0), tl.where(writes, b_dk, 0.0)
    if DECAY == CHANNEL:
        high, low = in_parts(tl.maximum(b_g, STRONGEST), b_k)
        # Triton lays products that follow one another out for a chain, at twice the registers, but looks no further
        # than a turn of a loop: hence loops of one turn, and exponents that are handed on to the next.
        once = tl.minimum(N, 1)
        into, after, exponent, leaf = tl.zeros_like(b_dq), tl.zeros_like(b_dq), tl.zeros_like(b_dq), once
        for _ in range(0, once):
            into, after, leaf = running(high, low, C)
            exponent = sums(facing(TOP, C), high, low)
        b_e = b_k * b_beta[:, None]
        b_dq, b_de, b_dk = b_dq * into, b_de * into, b_dk * after
        # Of the writes to the outgoing state those of rows s < t count for g of row t: all, less those from t on. That
        # of the last row, alone not decayed, counts for none: it must not drown the others.
        by_write = tl.where((r < C - 1) & (n * C + r < T - 1), b_k * b_dk, 0.0)
        everywhere = tl.sum(by_write, axis=0) + tl.load(gamma + index * K + channels) * passes
        from_here = b_q * b_dq + b_e * b_de - by_write
        same = tl.sum(tl.where(r == s, dP, 0.0), axis=1)[:, None]  # a row's read of its own write, without decay
        b_dq += same * b_k
        b_dk += same * b_q
        # Of pairs s < t <= r count for g of row t: rows r >= t less columns s >= t. Both are formed from the operands
        # as rounded, so that the rest cancels but for fp32's rounding.
        dP, dT = tl.where(s < r, dP, 0.0).to(q.dtype.element_ty), dT.to(q.dtype.element_ty)
        level = TOP
        while level >= leaf:
            chosen, by_row, by_column = pairs(exponent, level, leaf, C)
            right = (b_k * by_column).to(q.dtype.element_ty)
            pair, left = tl.where(chosen, dP, 0.0), (b_q * by_row).to(q.dtype.element_ty)
            on_row, on_column = dot(pair, right), dot(tl.trans(pair), left)
            b_dq, b_dk = b_dq + by_row * on_row, b_dk + by_column * on_column
            from_here += left * on_row - right * on_column
            pair, left = tl.where(chosen, dT, 0.0), (b_e * by_row).to(q.dtype.element_ty)
            on_row, on_column = dot(pair, right), dot(tl.trans(pair), left)
            b_de, b_dk = b_de + by_row * on_row, b_dk + by_column * on_column
            from_here += left * on_row - right * on_column
            level -= 1
            exponent = sums(facing(level, C), high, low)
        for _ in range(0, once):
            high, low = in_parts(from_here, b_k)
            from_here = sums(r <= s, high, low)
        store_rows(dg + line * K + first, from_here + everywhere[None, :], n * C, T, HV * K, C, BK)
    else:
        if DECAY == SCALAR:
            b_g = load_vector(g + line, n, T, HV, C)
            decay, into, after = decays(b_g, C, WIDE)
            b_dq, b_de, b_dk = b_dq * into[:, None], b_de * into[:, None], b_dk * after[:, None]
            dP, dT = dP * decay, dT * decay
            by_pair = dP * dot(b_q, tl.trans(b_k)) + dT * dot(b_k, tl.trans(b_k)) * b_beta[:, None]
            by_pair = tl.where(s < r, by_pair, 0.0)
            # Of pairs s < t <= r count for t: rows r >= t less columns s >= t. They are sums of the same numbers.
            by_read = tl.sum(b_q * b_dq + b_k * b_de * b_beta[:, None], axis=1) + tl.sum(by_pair, axis=1)
            by_read -= tl.sum(by_pair, axis=0)
            by_write = tl.sum(b_k * b_dk, axis=1)
            whole = tl.sum(tl.where((rows == C - 1) & (starts < 0), into, 0.0), axis=0)
            b_dg = sum_from_here(by_read) + sum_before(by_write) + whole * tl.sum(passes)
            tl.store(
                dg + (first // BK).to(tl.int64) * part + line + (n * C + rows).to(tl.int64) * HV,
                b_dg,
                mask=n * C + rows < T,
            )
        b_dP, b_dT = dP.to(q.dtype.element_ty), dT.to(q.dtype.element_ty)
        b_dTe = (dT * b_beta[:, None]).to(q.dtype.element_ty)
        b_dq += dot(b_dP, b_k)
        b_de += dot(b_dT, b_k)
        b_dk += dot(tl.trans(b_dP), b_q) + dot(tl.trans(b_dTe), b_k)
    b_dbeta += tl.sum(b_k * b_de, axis=1)
    b_dk += b_de * b_beta[:, None]
    out = (batch * T * HV + head) * K + first
    store_rows(dq + out, b_dq, n * C, T, HV * K, C, BK)
    store_rows(dk + out, b_dk, n * C, T, HV * K, C, BK)
    tl.store(
        dbeta + (first // BK).to(tl.int64) * part + line + (n * C + rows).to(tl.int64) * HV,
        b_dbeta,
        mask=n * C + rows < T,
    )
