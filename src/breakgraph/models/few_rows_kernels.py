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
def _finish(out_ptr, acc, row, column, mask, NUM_COLUMNS: tl.constexpr, ADD: tl.constexpr):
    """Store sums [columns, rows], added to what is there with ADD; rounded once."""
    out = out_ptr + row.to(tl.int64)[None, :] * NUM_COLUMNS + column[:, None]
    if ADD:
        acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated(gate, up):
    return up * gate / (1 + tl.exp(-gate))


@triton.jit
def vector_kernel(
    out_ptr, x_ptr, weight_ptr, x_stride,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """ROWS rows without tensor cores: weights go from memory to registers, from many small programs at a time.

    GATED: silu(gate) * up, of which the weight has NUM_COLUMNS rows each, the gate's first.
    Grid: (cdiv(NUM_COLUMNS, BLOCK_N),). BLOCK_M: ROWS, up to a power of two.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < NUM_COLUMNS
    inner = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    w_ptrs = weight_ptr + column.to(tl.int64)[:, None] * WIDTH + inner[None, :]
    up_ptrs = weight_ptr + (column.to(tl.int64) + NUM_COLUMNS)[:, None] * WIDTH + inner[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        live = inner < (BLOCK_K if WIDTH % BLOCK_K == 0 else WIDTH - first)
        mask = within[:, None] & live[None, :]
        w = tl.load(w_ptrs + first, mask=mask, other=0.0)
        if GATED:
            w_up = tl.load(up_ptrs + first, mask=mask, other=0.0)
        for i in tl.static_range(ROWS):
            x = tl.load(x_ptr + i * x_stride + first + inner, mask=live, other=0.0).to(tl.float32)[None, :]
            here = row[None, :] == i
            acc += tl.where(here, tl.sum(w.to(tl.float32) * x, 1)[:, None], 0.0)
            if GATED:
                up += tl.where(here, tl.sum(w_up.to(tl.float32) * x, 1)[:, None], 0.0)
    if GATED:
        acc = _gated(acc, up)
    _finish(out_ptr, acc, row, column, within[:, None] & (row < ROWS)[None, :], NUM_COLUMNS, ADD)


@triton.jit(do_not_specialize=["num_rows"])
def matrix_kernel(
    out_ptr, x_ptr, weight_ptr, partial_ptr, arrivals_ptr, num_rows, x_stride,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows with tensor cores, of whose product the weight is the first factor. GATED, without SPLITS: as
    in the other kernel.

    With SPLITS programs for each block of columns, the last one to get there sums their `partial` ones, [blocks,
    SPLITS, BLOCK_N, BLOCK_M] float32, in the order of the splits; `arrivals`, [blocks], are zero before and after.
    Grid: (cdiv(NUM_COLUMNS, BLOCK_N) * SPLITS,).
    """
    SHARE: tl.constexpr = (WIDTH + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    EVEN: tl.constexpr = WIDTH % (BLOCK_K * SPLITS) == 0
    block = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    within = column < NUM_COLUMNS
    live = row < num_rows
    start = split * SHARE
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + (start + inner)[None, :]
    w_ptrs = weight_ptr + column.to(tl.int64)[:, None] * WIDTH + (start + inner)[None, :]
    up_ptrs = weight_ptr + (column.to(tl.int64) + NUM_COLUMNS)[:, None] * WIDTH + (start + inner)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, SHARE, BLOCK_K):
        x_mask, w_mask = live[:, None], within[:, None]
        if not EVEN:
            rest = (start + first + inner < WIDTH)[None, :]
            x_mask, w_mask = x_mask & rest, w_mask & rest
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        w = tl.load(w_ptrs + first, mask=w_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            w = tl.load(up_ptrs + first, mask=w_mask, other=0.0)
            up = tl.dot(w, tl.trans(x), up, input_precision="ieee")
    if GATED:
        tl.static_assert(SPLITS == 1)
        acc = _gated(acc, up)
    mask = within[:, None] & live[None, :]
    if SPLITS > 1:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        partial_ptr += block.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        tl.store(partial_ptr + split * (BLOCK_N * BLOCK_M) + place, acc, mask=mask)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(arrivals_ptr + block, 0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(partial_ptr + i * (BLOCK_N * BLOCK_M) + place, mask=mask, other=0.0, cache_modifier=".cg")
    _finish(out_ptr, acc, row, column, mask, NUM_COLUMNS, ADD)


@triton.jit
def gate_kernel(out_ptr, x_ptr, NUM_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """silu(gate) * up of rows [2 * NUM_COLUMNS], dense: out [rows, NUM_COLUMNS].

    Grid: (rows, cdiv(NUM_COLUMNS, BLOCK_N)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < NUM_COLUMNS
    x_ptrs = x_ptr + row * (2 * NUM_COLUMNS) + column
    gate = tl.load(x_ptrs, mask=within, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + NUM_COLUMNS, mask=within, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_COLUMNS + column, _gated(gate, up).to(out_ptr.dtype.element_ty), mask=within)
