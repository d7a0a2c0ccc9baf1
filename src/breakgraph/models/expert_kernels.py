# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of a mixture's experts: grouped pairs of a token and an expert through two matrix products.

Only expert_ops.py imports this module: triton is not on every machine.

Pairs and their groups are those of expert_groups.py. Each row is computed by itself, in an order that depends on the
tile sizes alone: in one bucket, a pair's result has the same bits whatever else is in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from breakgraph.models.expert_groups import experts_of


@triton.jit
def _place(num_tiles, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Tile and block of columns of this program. GROUP tiles go through all blocks before the next ones start, side by
    side: tiles of one expert share its weights, and what a group reads stays in the cache where it is small."""
    group = tl.program_id(0) // (GROUP * BLOCKS)
    place = tl.program_id(0) % (GROUP * BLOCKS)
    size = tl.minimum(num_tiles - group * GROUP, GROUP)
    return group * GROUP + place % size, place // size


@triton.jit
def _of_tile(tile, row, rows_ptr, tile_experts_ptr, tile_rows_ptr, BLOCK_M: tl.constexpr):
    """Live rows of a tile, its expert, and its pairs, unwritten ones too. Nothing is asked in between: so the three
    loads are on their way at once, and a program that has little to do waits for memory once."""
    num_rows = tl.load(tile_rows_ptr + tile)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    return num_rows, expert, tl.load(rows_ptr + tile * BLOCK_M + row)


@triton.jit
def _mask(outer, first, inner, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of a block [outer, inner] from column `first` on: cheap where blocks fill the width."""
    if WIDTH % BLOCK_K == 0:
        return outer[:, None]
    else:
        return outer[:, None] & (first + inner < WIDTH)[None, :]


@triton.jit
def _multiply(rows, weights, acc, SWAP: tl.constexpr):
    """acc += rows [BLOCK_M, K] @ weights.T [K, BLOCK_N], acc transposed with SWAP: 16 or 32 rows are enough then to
    multiply as fast as the tensor cores of compute capability 9.0 can, which want 64 rows of the first factor."""
    if SWAP:
        return tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        return tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tiles"])
def up_kernel(
    hidden_ptr, x_ptr, weight_ptr, rows_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    x_stride, weight_expert, weight_row, weight_column,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """First product of each row, silu(gate) * up: hidden [num_tiles * BLOCK_M, NUM_COLUMNS], in the order of the tiles.

    The weight has the gate's rows first, NUM_COLUMNS of them.
    Grid: (num_tiles * cdiv(NUM_COLUMNS, BLOCK_N),).
    """
    tile, block = _place(num_tiles, tl.cdiv(NUM_COLUMNS, BLOCK_N), GROUP)
    row = tl.arange(0, BLOCK_M)
    num_rows, expert, pairs = _of_tile(tile, row, rows_ptr, tile_experts_ptr, tile_rows_ptr, BLOCK_M)
    if num_rows == 0:
        return
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    live = row < num_rows
    within = column < NUM_COLUMNS
    pairs = tl.where(live, pairs, 0)
    x_ptrs = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_ptr += expert * weight_expert
    w_ptrs = weight_ptr + column[:, None] * weight_row + inner[None, :] * weight_column
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    gate = acc
    for first in range(0, WIDTH, BLOCK_K):
        x = tl.load(x_ptrs + first, mask=_mask(live, first, inner, WIDTH, BLOCK_K), other=0.0)
        mask = _mask(within, first, inner, WIDTH, BLOCK_K)
        w = tl.load(w_ptrs + first * weight_column, mask=mask, other=0.0)
        gate = _multiply(x, w, gate, SWAP)
        w = tl.load(w_ptrs + NUM_COLUMNS * weight_row + first * weight_column, mask=mask, other=0.0)
        acc = _multiply(x, w, acc, SWAP)
    acc = acc * gate / (1 + tl.exp(-gate))
    if SWAP:
        acc = tl.trans(acc)
    out = hidden_ptr + (tile * BLOCK_M + row).to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]
    tl.store(out, acc.to(hidden_ptr.dtype.element_ty), mask=live[:, None] & within[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    out_ptr, hidden_ptr, weight_ptr, choice_ptr, rows_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    weight_expert, weight_row, weight_column,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Second product of each row, times the router's weight: out [pairs, NUM_COLUMNS], in the order of the pairs.

    Grid: (num_tiles * cdiv(NUM_COLUMNS, BLOCK_N),).
    """
    tile, block = _place(num_tiles, tl.cdiv(NUM_COLUMNS, BLOCK_N), GROUP)
    row = tl.arange(0, BLOCK_M)
    num_rows, expert, pairs = _of_tile(tile, row, rows_ptr, tile_experts_ptr, tile_rows_ptr, BLOCK_M)
    if num_rows == 0:
        return
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    live = row < num_rows
    within = column < NUM_COLUMNS
    pairs = tl.where(live, pairs, 0).to(tl.int64)
    choice = tl.load(choice_ptr + pairs, mask=live, other=0.0).to(tl.float32)
    h_ptrs = hidden_ptr + (tile * BLOCK_M + row).to(tl.int64)[:, None] * WIDTH + inner[None, :]
    w_ptrs = weight_ptr + expert * weight_expert + column[:, None] * weight_row + inner[None, :] * weight_column
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        h = tl.load(h_ptrs + first, mask=_mask(live, first, inner, WIDTH, BLOCK_K), other=0.0)
        mask = _mask(within, first, inner, WIDTH, BLOCK_K)
        w = tl.load(w_ptrs + first * weight_column, mask=mask, other=0.0)
        acc = _multiply(h, w, acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    acc *= choice[:, None]
    out = out_ptr + pairs[:, None] * NUM_COLUMNS + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & within[None, :])


@triton.jit
def combine_kernel(
    out_ptr, parts_ptr, index_ptr, live_ptr, residual_ptr, num_pairs,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, LIVE: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The sum of each token's parts, [tokens, NUM_COLUMNS] of [pairs, NUM_COLUMNS]; that of padding rows is zero. With
    RESIDUAL [tokens, NUM_COLUMNS] it is rounded, and added to that.

    Grid: (tokens, cdiv(NUM_COLUMNS, BLOCK_N)). BLOCK_T: TOP_K, up to a power of two.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    choice = tl.arange(0, BLOCK_T)
    pairs = token * TOP_K + choice
    experts = experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    used = (choice < TOP_K) & (experts < NUM_EXPERTS)
    ptrs = parts_ptr + pairs.to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]
    parts = tl.load(ptrs, mask=used[:, None] & (column < NUM_COLUMNS)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(parts, 0).to(out_ptr.dtype.element_ty)
    place = token.to(tl.int64) * NUM_COLUMNS + column
    if RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=column < NUM_COLUMNS, other=0.0)
        total = (residual.to(tl.float32) + total.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, total, mask=column < NUM_COLUMNS)
