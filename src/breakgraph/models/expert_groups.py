# mypy: allow-untyped-defs, allow-incomplete-defs
"""Pairs of a token and an expert, grouped by expert: what the products of expert_kernels.py work on.

Only expert_ops.py and expert_kernels.py import this module: triton is not on every machine.

A pair is one of the `top_k` choices of a token, numbered token * top_k + choice. Pairs are grouped by a stable counting
sort, and each expert's group is cut into tiles of BLOCK_M rows, of which the last may be partly empty: the scheme of
"MegaBlocks" (Gale et al., 2022). Where pairs are few, each program counts all of them for itself: one kernel, and not
three (count, scan, place), whose starts would cost more than the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# More than any number of experts.
NOBODY = tl.constexpr(1 << 20)

_FEW = 8192
"""Pairs, that one kernel sorts."""
_SMALL_CHUNK, _CHUNK = 64, 128
"""Pairs that one program places, of few and of many."""
_WARPS = 8
_BLOCK = 4096
"""Pairs that a program of the one kernel counts at a time."""


@triton.jit
def experts_of(
    index_ptr, live_ptr, pairs, num_pairs, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, LIVE: tl.constexpr
):  # fmt: skip
    """Expert of each pair; NOBODY for those that have none: padding, and sentinels of the router."""
    # Padding is read as well: so no load waits for another.
    experts = tl.load(index_ptr + pairs, mask=pairs < num_pairs, other=-1)
    known = (experts >= 0) & (experts < NUM_EXPERTS)
    if LIVE:
        known &= pairs // TOP_K < tl.load(live_ptr)
    return tl.where(known, experts.to(tl.int32), NOBODY)


@triton.jit
def _place(
    rows_ptr, tile_experts_ptr, tile_rows_ptr, before, totals, pairs, experts, num_tiles,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program's part: the rows of `pairs` [CHUNK], of whose experts there are `before` [BLOCK_E] in earlier chunks,
    and TILES tiles."""
    tiles = (totals + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    starts = (ends - tiles) * BLOCK_M

    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    expert = tl.minimum(expert, NUM_EXPERTS - 1)
    left = tl.gather(starts + totals, expert, 0) - tile * BLOCK_M
    inside = tile < num_tiles
    tl.store(tile_experts_ptr + tile, expert, mask=inside)
    tl.store(tile_rows_ptr + tile, tl.maximum(tl.minimum(left, BLOCK_M), 0), mask=inside)

    order = tl.arange(0, CHUNK)
    earlier = (experts[None, :] == experts[:, None]) & (order[None, :] < order[:, None])
    bases = tl.gather(starts + before, tl.minimum(experts, NUM_EXPERTS - 1), 0)
    places = bases + tl.sum(earlier.to(tl.int32), 1)
    tl.store(rows_ptr + places, pairs, mask=experts < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def group_kernel(
    rows_ptr, tile_experts_ptr, tile_rows_ptr, index_ptr, live_ptr, num_pairs, num_tiles,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """All of it, for few pairs: what place_kernel gives, without counts. Grid: (chunks,)."""
    first = tl.program_id(0) * CHUNK
    # Those before this chunk are counted apart from the others, in the first half of the bins.
    counts = tl.zeros((2 * BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        experts = experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
        bins = tl.where(pairs < first, experts, experts + BLOCK_E)
        counts += tl.histogram(bins, 2 * BLOCK_E, mask=experts < NUM_EXPERTS)
    counts = tl.reshape(counts, (2, BLOCK_E))
    before = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, counts, 0), 0)
    pairs = first + tl.arange(0, CHUNK)
    experts = experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    _place(
        rows_ptr, tile_experts_ptr, tile_rows_ptr, before, tl.sum(counts, 0), pairs, experts, num_tiles,
        NUM_EXPERTS, BLOCK_E, CHUNK, BLOCK_M, TILES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    counts_ptr, index_ptr, live_ptr, num_pairs,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert in each chunk: counts [chunks, BLOCK_E]. Grid: (chunks,)."""
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    counts = tl.histogram(experts, BLOCK_E, mask=experts < NUM_EXPERTS)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)


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


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
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
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = experts_of(index_ptr, live_ptr, pairs, num_pairs, TOP_K, NUM_EXPERTS, LIVE)
    _place(
        rows_ptr, tile_experts_ptr, tile_rows_ptr, tl.load(counts_ptr + chunk * BLOCK_E + columns),
        tl.load(totals_ptr + columns), pairs, experts, num_tiles, NUM_EXPERTS, BLOCK_E, CHUNK, BLOCK_M, TILES,
    )  # fmt: skip


@dataclass(frozen=True)
class Groups:
    """What place_kernel writes. Tiles of one expert lie next to each other."""

    rows: Tensor
    tile_experts: Tensor
    tile_rows: Tensor
    num_tiles: int
    block_m: int


def group(index: Tensor, num_live: Tensor | None, num_experts: int, block_m: int) -> Groups:
    """`index` [T, k], dense: of which rows from `num_live` [1] on, and what is no expert, are in no group."""
    num_pairs, top_k = index.numel(), index.shape[1]
    block_e = triton.next_power_of_2(num_experts)
    is_small = num_pairs <= _FEW
    chunk = _SMALL_CHUNK if is_small else _CHUNK
    chunks = triton.cdiv(num_pairs, chunk)
    # Each expert may leave a tile partly empty, and one without pairs has none.
    num_tiles = min(num_pairs, triton.cdiv(num_pairs, block_m) + num_experts)
    num_counts = 0 if is_small else (chunks + 1) * block_e
    made = index.new_empty(num_counts + num_tiles * (block_m + 2), dtype=torch.int32)
    counts, rows, tile_experts, tile_rows = made.split([num_counts, num_tiles * block_m, num_tiles, num_tiles])
    live = index if num_live is None else num_live
    common = {
        "TOP_K": top_k, "NUM_EXPERTS": num_experts, "BLOCK_E": block_e, "CHUNK": chunk, "LIVE": num_live is not None,
    }  # fmt: skip
    tiles = {
        "BLOCK_M": block_m, "TILES": triton.next_power_of_2(triton.cdiv(num_tiles, chunks)), "num_warps": _WARPS,
    }  # fmt: skip
    if is_small:
        block = min(_BLOCK, max(256, triton.next_power_of_2(num_pairs)))
        group_kernel[(chunks,)](
            rows, tile_experts, tile_rows, index, live, num_pairs, num_tiles, **common, **tiles, BLOCK=block
        )
    else:
        counts, totals = counts[:-block_e], counts[-block_e:]
        count_kernel[(chunks,)](counts, index, live, num_pairs, **common, num_warps=4)
        columns = min(block_e, 16)
        scan_kernel[(block_e // columns,)](
            counts, totals, chunks, BLOCK_E=block_e, ROWS=128, COLUMNS=columns, num_warps=4
        )
        place_kernel[(chunks,)](
            rows, tile_experts, tile_rows, counts, totals, index, live, num_pairs, num_tiles, **common, **tiles
        )
    return Groups(rows, tile_experts, tile_rows, num_tiles, block_m)
