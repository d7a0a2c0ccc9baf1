"""Products of few rows with a weight, as one operator around our Triton kernels; of more rows, as torch computes them.

How many rows there are is seen when the operator runs, which is when a graph is captured: code that was compiled once
for any number of rows gets in each bucket what is fastest there. Imported only where models are compiled.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor, nn

from breakgraph.attention.triton_ops import has_large_shared_memory
from breakgraph.models.few_rows_kernels import matrix_kernel, vector_kernel
from breakgraph.models.merging import is_plain

MAX_ROWS = 32
"""Of our kernels. With more, cuBLAS was as fast or faster."""
DTYPES = (torch.bfloat16, torch.float16)
_MANY = 1 << 30


@dataclass(frozen=True)
class Tile:
    """How the programs of a product cut the weight."""

    block_n: int
    """Columns of the result, that is rows of the weight."""
    block_k: int
    num_warps: int
    num_stages: int = 1
    """Parts of the weight that are on their way at a time. With one row nothing is staged."""


# By columns of the product, at most: the fastest of a few on an H200. With one row the weight goes to registers. With
# more it is staged in shared memory, together with the rows: 192 KiB at most, of the 224 that are there; the small ones
# need 48 KiB and were not tuned.
_ONE_ROW = ((8192, Tile(1, 4096, 4)), (_MANY, Tile(2, 1024, 4)))
_TILES = ((8192, Tile(64, 128, 4, 8)), (_MANY, Tile(64, 128, 4, 3)))
_SMALL_TILES = ((_MANY, Tile(32, 128, 4, 4)),)


@lru_cache
def tile_for(num_rows: int, num_columns: int, has_large_memory: bool) -> Tile:
    """Of a product, on a GPU with much shared memory or little."""
    tiles = _ONE_ROW if num_rows == 1 else _TILES if has_large_memory else _SMALL_TILES
    return next(tile for columns, tile in tiles if num_columns <= columns)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernels multiply x [M, K] with the rows of `weight` [N, K]."""
    has_few = x.dim() == 2 and 0 < x.shape[0] <= MAX_ROWS and weight.numel() > 0 and x.shape[1:] == weight.shape[1:]
    return has_few and x.dtype == weight.dtype and x.dtype in DTYPES and x.stride(1) == 1 and weight.is_contiguous()


def multiply(out: Tensor, x: Tensor, weight: Tensor, add: bool = False, tile: Tile | None = None) -> None:
    """out [M, N], dense, = or with `add` += x [M, K] @ weight.T, of tensors that `takes` accepts."""
    num_rows, width, num_columns = *x.shape, weight.shape[0]
    tile = tile or tile_for(num_rows, num_columns, has_large_shared_memory(x.device))
    grid = (triton.cdiv(num_columns, tile.block_n),)
    sizes = {"WIDTH": width, "NUM_COLUMNS": num_columns, "BLOCK_N": tile.block_n, "ADD": add}
    # Triton launches on the current device, whatever its arguments.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        if num_rows == 1:
            block_k = min(tile.block_k, triton.next_power_of_2(width))
            vector_kernel[grid](out, x, weight, **sizes, BLOCK_K=block_k, num_warps=tile.num_warps)
        else:
            matrix_kernel[grid](
                out, x, weight, num_rows, x.stride(0), **sizes, BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
                BLOCK_K=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip


class _FewRowsLinear(nn.Linear):
    """A layer outside the blocks. A class, and no function on the instance, as in merging.py."""

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = few_rows_product(input.reshape(-1, self.in_features), self.weight)
        return rows.view(*input.shape[:-1], self.out_features)


def choose_by_rows(layer: nn.Module | None) -> bool:
    """Let a linear layer without a bias compute with the operator; False, and nothing done, for any other layer."""
    if not isinstance(layer, nn.Linear) or not is_plain(layer) or layer.bias is not None:
        return False
    layer.__class__ = _FewRowsLinear
    return True


def _few_rows_product(x: Tensor, weight: Tensor) -> Tensor:
    if not takes(x, weight):
        return torch.mm(x, weight.t())
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply(out, x, weight)
    return out


def _add_product(x: Tensor, left: Tensor, right: Tensor) -> None:
    rows = x.view(-1, x.shape[-1])
    if takes(left, right.t()) and rows.dtype == left.dtype and rows.is_contiguous():
        multiply(rows, left, right.t(), add=True)
    else:
        rows.addmm_(left, right)


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define("few_rows_product(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.define("add_product_(Tensor(a!) x, Tensor left, Tensor right) -> ()")
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("few_rows_product", _few_rows_product, _key)
    _LIBRARY.impl("add_product_", _add_product, _key)
_LIBRARY.impl("few_rows_product", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]), "Meta")
_LIBRARY.impl("add_product_", lambda x, left, right: None, "Meta")

few_rows_product: Any = torch.ops.breakgraph.few_rows_product.default
"""x [M, K] @ weight [N, K].T, any M: dense [M, N]. With MAX_ROWS rows or fewer, the bits of each depend on it and on M
alone; sums are in float32 and rounded once."""

add_product: Any = torch.ops.breakgraph.add_product_.default
"""x [..., N] += left [M, K] @ right [K, N], where x has M rows, one as far from the next as all others."""
