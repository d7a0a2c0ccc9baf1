# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of a product of few rows with a weight: as fast as the weight can be read.

Only few_rows.py imports this module: triton is not on every machine.

Each row is computed by itself, in an order that depends on the tile alone: its bits are the same whatever else is in
the product, and on every run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _finish(out, acc, mask, ADD: tl.constexpr):
    """Store sums, added to what is there with ADD; rounded once."""
    if ADD:
        acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def vector_kernel(
    out_ptr, x_ptr, weight_ptr,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One row without tensor cores: weights go from memory to registers, in many small programs at a time.

    Grid: (cdiv(NUM_COLUMNS, BLOCK_N),).
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < NUM_COLUMNS
    inner = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + column.to(tl.int64)[:, None] * WIDTH + inner[None, :]
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        live = inner < (BLOCK_K if WIDTH % BLOCK_K == 0 else WIDTH - first)
        w = tl.load(w_ptrs + first, mask=within[:, None] & live[None, :], other=0.0).to(tl.float32)
        x = tl.load(x_ptr + first + inner, mask=live, other=0.0).to(tl.float32)
        acc += tl.sum(w * x[None, :], 1)
    _finish(out_ptr + column, acc, within, ADD)


@triton.jit(do_not_specialize=["num_rows"])
def matrix_kernel(
    out_ptr, x_ptr, weight_ptr, num_rows, x_stride,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows with tensor cores, of whose product the weight is the first factor.

    Grid: (cdiv(NUM_COLUMNS, BLOCK_N),).
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    within = column < NUM_COLUMNS
    live = row < num_rows
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_ptrs = weight_ptr + column.to(tl.int64)[:, None] * WIDTH + inner[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        x_mask, w_mask = live[:, None], within[:, None]
        if WIDTH % BLOCK_K != 0:
            rest = (first + inner < WIDTH)[None, :]
            x_mask, w_mask = x_mask & rest, w_mask & rest
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        w = tl.load(w_ptrs + first, mask=w_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    out = out_ptr + row.to(tl.int64)[None, :] * NUM_COLUMNS + column[:, None]
    _finish(out, acc, within[:, None] & live[None, :], ADD)
