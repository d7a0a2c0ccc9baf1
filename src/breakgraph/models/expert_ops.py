"""The experts of a mixture as one operator around our Triton kernels.

It reads nothing on the host and its grids depend on shapes alone, so a captured graph serves any routing. Rows behind
the live ones cost no expert anything.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from breakgraph.attention.triton_ops import dense_heads, has_large_shared_memory
from breakgraph.models.expert_groups import Groups, group
from breakgraph.models.expert_kernels import combine_kernel, down_kernel, up_kernel
from breakgraph.models.routing import show_routing

_MANY = 1 << 30


@dataclass(frozen=True)
class Tile:
    """How one program of a product cuts its work, beside the rows."""

    block_n: int
    """Columns of the result: in the first product as many of the gate and as many beside it."""
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    """Whether the weight is the first factor, see expert_kernels.py."""
    group: int = 1 << 20
    """Tiles that go through all columns before the next ones start; by default all of them."""


@dataclass(frozen=True)
class Tiles:
    """Of both products: with the same rows, in which the pairs are grouped."""

    block_m: int
    up: Tile
    down: Tile


# By rows of an expert, about; the last for all above. Few rows are there to read weights, many to multiply. The first
# are the fastest of a few on an H200 and need 144 KiB of shared memory; the others need 72 KiB and were not tuned.
_TILES = {
    16: Tiles(16, Tile(64, 128, 4, 3, swap=True, group=4), Tile(128, 128, 8, 3, swap=True, group=4)),
    64: Tiles(64, Tile(64, 64, 4, 3, group=4), Tile(128, 64, 4, 4, group=4)),
    _MANY: Tiles(128, Tile(128, 64, 8, 4, group=8), Tile(256, 64, 8, 4, group=8)),
}
_SMALL_TILES = {
    16: Tiles(16, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    64: Tiles(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    _MANY: Tiles(128, Tile(64, 64, 8, 2), Tile(128, 64, 8, 2)),
}
_FLOAT32 = Tiles(16, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2))


@lru_cache
def tiles_for(num_pairs: int, num_experts: int, dtype: torch.dtype, has_large_memory: bool) -> Tiles:
    """For a step of so many pairs, evenly spread, on a GPU with much shared memory or little."""
    if dtype == torch.float32:
        return _FLOAT32
    tiles = _TILES if has_large_memory else _SMALL_TILES
    return next(tile for rows, tile in tiles.items() if num_pairs / num_experts <= rows)


def up(x: Tensor, groups: Groups, weight: Tensor, top_k: int, tile: Tile) -> Tensor:
    """`weight` [E, 2 * columns, width] with any strides; gives hidden rows in the order of the groups."""
    num_columns = weight.shape[1] // 2
    hidden = x.new_empty(groups.rows.numel(), num_columns)
    up_kernel[(groups.num_tiles * triton.cdiv(num_columns, tile.block_n),)](
        hidden, x, weight, groups.rows, groups.tile_experts, groups.tile_rows,
        groups.num_tiles, x.stride(0), *weight.stride(), TOP_K=top_k, WIDTH=x.shape[1], NUM_COLUMNS=num_columns,
        BLOCK_M=groups.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SWAP=tile.swap, GROUP=tile.group,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return hidden


def down(hidden: Tensor, groups: Groups, weight: Tensor, choice: Tensor, tile: Tile) -> Tensor:
    """`weight` [E, columns, width] with any strides; gives a row for each pair, [pairs, columns]."""
    num_columns = weight.shape[1]
    parts = hidden.new_empty(choice.numel(), num_columns)
    down_kernel[(groups.num_tiles * triton.cdiv(num_columns, tile.block_n),)](
        parts, hidden, weight, choice, groups.rows, groups.tile_experts,
        groups.tile_rows, groups.num_tiles, *weight.stride(), WIDTH=hidden.shape[1], NUM_COLUMNS=num_columns,
        BLOCK_M=groups.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SWAP=tile.swap, GROUP=tile.group,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return parts


def _combine(
    parts: Tensor, index: Tensor, num_live: Tensor | None, num_experts: int, residual: Tensor | None
) -> Tensor:  # fmt: skip
    num_tokens, top_k = index.shape
    out = parts.new_empty(num_tokens, parts.shape[1])
    block_n = min(1024, triton.next_power_of_2(parts.shape[1]))
    combine_kernel[(num_tokens, triton.cdiv(parts.shape[1], block_n))](
        out, parts, index, index if num_live is None else num_live, parts if residual is None else residual,
        index.numel(), TOP_K=top_k, NUM_EXPERTS=num_experts, BLOCK_T=triton.next_power_of_2(top_k),
        NUM_COLUMNS=parts.shape[1], BLOCK_N=block_n, LIVE=num_live is not None, RESIDUAL=residual is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def _gated_experts(
    x: Tensor, gate_up: Tensor, down_weight: Tensor, index: Tensor, choice: Tensor, num_live: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    num_experts, top_k = gate_up.shape[0], index.shape[1]
    show_routing(index, num_experts, num_live)
    if not x.shape[0]:
        return x.new_empty(x.shape)
    x, index, choice = dense_heads(x), index.contiguous(), choice.contiguous()
    tiles = tiles_for(index.numel(), num_experts, x.dtype, has_large_shared_memory(x.device))
    # Triton launches on the current device, whatever its arguments.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        groups = group(index, num_live, num_experts, tiles.block_m)
        hidden = up(x, groups, gate_up, top_k, tiles.up)
        parts = down(hidden, groups, down_weight, choice, tiles.down)
        return _combine(parts, index, num_live, num_experts, residual)


def _added_experts(
    residual: Tensor, x: Tensor, gate_up: Tensor, down_weight: Tensor, index: Tensor, choice: Tensor,
    num_live: Tensor | None,
) -> Tensor:  # fmt: skip
    total = _gated_experts(x, gate_up, down_weight, index, choice, num_live, residual.contiguous())
    return total.view(residual.shape)


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_ARGUMENTS = "Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor choice, Tensor? num_live"
_LIBRARY.define(f"gated_experts({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"added_experts(Tensor residual, {_ARGUMENTS}) -> Tensor")
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("gated_experts", _gated_experts, _key)
    _LIBRARY.impl("added_experts", _added_experts, _key)
for _operator in ("gated_experts", "added_experts"):
    _LIBRARY.impl(_operator, lambda first, *_: first.new_empty(first.shape), "Meta")

gated_experts: Any = torch.ops.breakgraph.gated_experts.default
"""x [T, H], gate_up [E, 2 * I, H] (gates first), down [E, H, I], index [T, k] int64 and choice [T, k] to [T, H].

The sum over k of choice * (silu(x @ gate.T) * (x @ up.T)) @ down.T. Experts outside 0 to E - 1 and rows from `num_live`
[1] on give zeros.
"""

added_experts: Any = torch.ops.breakgraph.added_experts.default
"""residual, T * H numbers of x's dtype in any shape, + the same, rounded to that dtype before it is added."""
