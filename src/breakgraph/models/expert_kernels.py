# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of a mixture's experts: pairs of a token and an expert, by expert, through two matrix products.

Only expert_ops.py imports this module: triton is not on every machine.

A pair is one of the `top_k` choices of a token, numbered token * top_k + choice. Pairs are grouped by a stable counting
sort in three kernels (count, scan, place), and each expert's group is cut into tiles of BLOCK_M rows, of which the last
may be partly empty: the scheme of "MegaBlocks" (Gale et al., 2022). Each row is computed by itself, in an order that
depends on the tile sizes alone: in one bucket, a pair's result has the same bits whatever else is in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

# More than any number of experts.
NOBODY = tl.constexpr(1 << 20)


@triton.jit
def _experts_of(
    index_ptr, live_ptr, pairs, num_pairs, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, LIVE: tl.constexpr
):  # fmt: skip
    """Expert of each pair; NOBODY for those that have none: padding, and sentinels of the router."""
    used = pairs < num_pairs
    if LIVE:
        used &= pairs // TOP_K < tl.load(live_ptr)
    experts = tl.load(index_ptr + pairs, mask=used, other=-1).to(tl.int32)
    return tl.where((experts >= 0) & (experts < NUM_EXPERTS), experts, NOBODY)


@triton.jit
def count_kernel(
    counts_ptr, index_ptr, live_ptr, num_pairs,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert in each chunk: counts [chunks, BLOCK_E]. Grid: (chunks,)."""
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = _experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    columns = tl.arange(0, BLOCK_E)
    hits = (experts[:, None] == columns[None, :]).to(tl.int32)
    tl.store(counts_ptr + chunk * BLOCK_E + columns, tl.sum(hits, 0))


@triton.jit
def scan_kernel(counts_ptr, totals_ptr, num_chunks, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Counts become those of the chunks before; totals [BLOCK_E] are of all. Grid: (BLOCK_E // COLUMNS,)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, num_chunks, ROWS):
        rows = first + tl.arange(0, ROWS)
        ptrs = counts_ptr + rows[:, None] * BLOCK_E + columns[None, :]
        mask = rows[:, None] < num_chunks
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, tl.cumsum(counts, 0) - counts + before[None, :], mask=mask)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + columns, before)


@triton.jit
def place_kernel(
    rows_ptr, tile_experts_ptr, tile_rows_ptr, counts_ptr, totals_ptr, index_ptr, live_ptr, num_pairs, num_tiles,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Which pair lies in each row, and whose each tile is. Grid: (chunks,), of which each also describes TILES tiles.

    rows [num_tiles * BLOCK_M], unwritten where a tile is not full; tile_experts and tile_rows [num_tiles], the latter 0
    for tiles that nobody needs.
    """
    chunk = tl.program_id(0)
    columns = tl.arange(0, BLOCK_E)
    totals = tl.load(totals_ptr + columns)
    tiles = (totals + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    starts = (ends - tiles) * BLOCK_M

    tile = chunk * TILES + tl.arange(0, TILES)
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = (columns[None, :] == expert[:, None]).to(tl.int32)
    left = tl.sum(mine * (starts + totals)[None, :], 1) - tile * BLOCK_M
    inside = tile < num_tiles
    tl.store(tile_experts_ptr + tile, tl.minimum(expert, NUM_EXPERTS - 1), mask=inside)
    tl.store(tile_rows_ptr + tile, tl.maximum(tl.minimum(left, BLOCK_M), 0), mask=inside)

    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = _experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    hits = (experts[:, None] == columns[None, :]).to(tl.int32)
    base = starts + tl.load(counts_ptr + chunk * BLOCK_E + columns)
    places = tl.sum(hits * (base[None, :] + tl.cumsum(hits, 0) - hits), 1)
    tl.store(rows_ptr + places, pairs, mask=experts < NUM_EXPERTS)


@triton.jit
def up_kernel(
    hidden_ptr, x_ptr, weight_ptr, rows_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    x_stride, weight_expert, weight_row, weight_column,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """First product of each row, silu(gate) * up: hidden [num_tiles * BLOCK_M, NUM_COLUMNS], in the order of the tiles.

    The weight has the gate's rows first, NUM_COLUMNS of them.
    Grid: (num_tiles * cdiv(NUM_COLUMNS, BLOCK_N),): tiles of one expert next to each other, so that they share weights.
    """
    tile = tl.program_id(0) % num_tiles
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) // num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    live = row < num_rows
    within = column < NUM_COLUMNS
    pairs = tl.load(rows_ptr + tile * BLOCK_M + row, mask=live, other=0)
    x_ptrs = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_ptr += expert * weight_expert
    w_ptrs = weight_ptr + column[None, :] * weight_row + inner[:, None] * weight_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        here = first + inner < WIDTH
        x = tl.load(x_ptrs + first, mask=live[:, None] & here[None, :], other=0.0)
        mask = within[None, :] & here[:, None]
        w = tl.load(w_ptrs + first * weight_column, mask=mask, other=0.0)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        w = tl.load(w_ptrs + NUM_COLUMNS * weight_row + first * weight_column, mask=mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    acc = acc * gate / (1 + tl.exp(-gate))
    out = hidden_ptr + (tile * BLOCK_M + row).to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]
    tl.store(out, acc.to(hidden_ptr.dtype.element_ty), mask=live[:, None] & within[None, :])


@triton.jit
def down_kernel(
    out_ptr, hidden_ptr, weight_ptr, choice_ptr, rows_ptr, tile_experts_ptr, tile_rows_ptr, num_tiles,
    weight_expert, weight_row, weight_column,
    WIDTH: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Second product of each row, times the router's weight: out [pairs, NUM_COLUMNS], in the order of the pairs."""
    tile = tl.program_id(0) % num_tiles
    num_rows = tl.load(tile_rows_ptr + tile)
    if num_rows == 0:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) // num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    live = row < num_rows
    within = column < NUM_COLUMNS
    h_ptrs = hidden_ptr + (tile * BLOCK_M + row).to(tl.int64)[:, None] * WIDTH + inner[None, :]
    w_ptrs = weight_ptr + expert * weight_expert + column[None, :] * weight_row + inner[:, None] * weight_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        here = first + inner < WIDTH
        h = tl.load(h_ptrs + first, mask=live[:, None] & here[None, :], other=0.0)
        w = tl.load(w_ptrs + first * weight_column, mask=within[None, :] & here[:, None], other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    pairs = tl.load(rows_ptr + tile * BLOCK_M + row, mask=live, other=0).to(tl.int64)
    acc *= tl.load(choice_ptr + pairs, mask=live, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + pairs[:, None] * NUM_COLUMNS + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & within[None, :])


@triton.jit
def combine_kernel(
    out_ptr, parts_ptr, index_ptr, live_ptr, num_pairs,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """The sum of each token's parts, [tokens, NUM_COLUMNS] of [pairs, NUM_COLUMNS]; padding rows are zero.

    Grid: (tokens, cdiv(NUM_COLUMNS, BLOCK_N)). BLOCK_T: TOP_K, up to a power of two.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    choice = tl.arange(0, BLOCK_T)
    pairs = token * TOP_K + choice
    experts = _experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    used = (choice < TOP_K) & (experts < NUM_EXPERTS)
    ptrs = parts_ptr + pairs.to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]
    parts = tl.load(ptrs, mask=used[:, None] & (column < NUM_COLUMNS)[None, :], other=0.0).to(tl.float32)
    out = out_ptr + token.to(tl.int64) * NUM_COLUMNS + column
    tl.store(out, tl.sum(parts, 0).to(out_ptr.dtype.element_ty), mask=column < NUM_COLUMNS)
