"""What the Triton kernels share: products, scans over rows, and who sees whom in a chunk."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, onto=None):
    """a @ b, accumulated in fp32 (onto `onto`, if given); fp32 operands go as three tf32 products."""
    return tl.dot(a, b, onto, input_precision="tf32x3")


@triton.jit
def _add_shifted(total, before, next_total, next_before):
    return total + next_total, total + next_before


@triton.jit
def sum_before(x):
    """Sum over the rows above each row. Not cumsum(x) - x: under a strong decay a row dwarfs those above it."""
    return tl.associative_scan((x, tl.zeros_like(x)), 0, _add_shifted)[1]


@triton.jit
def sum_from_here(x):
    """Sum over each row and those below it."""
    return tl.cumsum(x, axis=0, reverse=True)


@triton.jit
def load_starts(row_start, batch, n, T, C: tl.constexpr):
    """row_start of chunk n's rows, counted from the chunk's first row, and of its last row.

    Rows past T prolong the last document, so that the state which leaves the last chunk is the one after token T - 1.
    """
    rows = n * C + tl.arange(0, C)
    base = row_start + batch.to(tl.int64) * T
    starts = tl.load(base + tl.minimum(rows, T - 1)) - n * C
    last = tl.load(base + tl.minimum(n * C + C - 1, T - 1)) - n * C
    return starts, last


@triton.jit
def load_rows(pointer, first, limit, stride: tl.constexpr, R: tl.constexpr, J: tl.constexpr):
    """Rows first .. first + R of a matrix with rows of J elements `stride` apart; zeros from row `limit` on."""
    rows = tl.arange(0, R)
    block = pointer + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + tl.arange(0, J)[None, :]
    return tl.load(block, mask=(first + rows < limit)[:, None], other=0.0)


@triton.jit
def store_rows(pointer, x, first, limit, stride: tl.constexpr, R: tl.constexpr, J: tl.constexpr):
    """The counterpart of `load_rows`: casts to the pointer's type, and leaves rows from `limit` on alone."""
    rows = tl.arange(0, R)
    block = pointer + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + tl.arange(0, J)[None, :]
    tl.store(block, x.to(pointer.dtype.element_ty), mask=(first + rows < limit)[:, None])
