"""Other tiles of the Triton kernels than those of their tables, timed: `attention_bench.py --sweep`."""

from __future__ import annotations

import torch
from attention_bench import Timing, launched, timed_row, triton_only
from triton import OutOfResources

from breakgraph.attention import triton_ops
from breakgraph.attention.triton_ops import Tile
from breakgraph.bench.result import Row

PREFILL_TILES = (
    Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 64, 4, 3),
    Tile(64, 128, 4, 3), Tile(64, 64, 4, 3), Tile(256, 64, 8, 3), Tile(128, 128, 8, 4),
)  # fmt: skip
DECODE_TILES = (
    Tile(16, 64, 4, 3, 4), Tile(16, 64, 4, 4, 4), Tile(16, 64, 4, 2, 4), Tile(16, 64, 2, 3, 4), Tile(16, 128, 4, 2, 2),
    Tile(16, 128, 4, 3, 2), Tile(16, 128, 8, 3, 2), Tile(16, 32, 4, 4, 8), Tile(16, 32, 2, 5, 8), Tile(16, 64, 4, 5, 4),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)


@torch.inference_mode()
def sweep(timing: Timing, copy_rate: float) -> list[Row]:
    """The attention alone with each tile, and for decode with each number of splits on the fastest tile; best last."""
    cases, rows = timing.cases(), []
    decode = timing.phase == "decode"
    chooser, tiles = ("decode_tile", DECODE_TILES) if decode else ("varlen_tile", PREFILL_TILES)
    before = getattr(triton_ops, chooser), triton_ops.num_splits

    def time(tile: Tile, splits: int | None) -> float:
        setattr(triton_ops, chooser, lambda *key: tile)
        triton_ops.num_splits = before[1] if splits is None else lambda *shape: splits
        what = f"{tile.block_m}x{tile.block_n} warps {tile.num_warps} stages {tile.num_stages} min {tile.min_tiles}"
        calls = [triton_only(case) for case in cases]
        try:
            median = launched(calls * max(1, 8 // len(calls)), 9)
        except OutOfResources as failure:
            print(f"{timing.name:18} {what:34} {failure}", flush=True)
            return float("inf")
        params = {"tile": what, "splits": splits or "chosen"}
        rows.append(timed_row(f"{timing.name}, sweep", params, median, timing.rate(median, copy_rate)))
        return median.median

    try:
        best = min(tiles, key=lambda tile: time(tile, None))
        for splits in SPLITS if decode else ():
            time(best, splits)
    finally:
        setattr(triton_ops, chooser, before[0])
        triton_ops.num_splits = before[1]
    fastest = min(rows, key=lambda row: row.metrics["time"].value)
    print(f"{timing.name:18} best: {' '.join(str(value) for value in fastest.params.values())}", flush=True)
    return rows
