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
from breakgraph.models.few_rows_kernels import gate_kernel, matrix_kernel, vector_kernel
from breakgraph.models.merging import is_plain

MAX_ROWS = 16
"""Of our kernels. Above, the products take as long as their arithmetic, and cuBLAS is as fast or faster."""
DTYPES = (torch.bfloat16, torch.float16)
_MANY = 1 << 30
_GATE_COLUMNS = 1024
"""Of one program that only gates."""


@dataclass(frozen=True)
class Tile:
    """How the programs of a product cut the weight."""

    block_n: int
    """Columns of the result, that is rows of the weight."""
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1
    """Programs that share the width, for each block of columns."""
    is_vector: bool = False
    """Whether the tensor cores are left out; without stages and splits then, and for 4 rows at most."""


# Rows and columns that a tile is for, at most. What counts are the bytes on their way from memory, 5 MB on an H200: 40
# KiB for each multiprocessor. With one row registers hold them, with more the stages of one or two programs do.
_TILES = (
    (1, _MANY, Tile(4, 2048, 4, 1, is_vector=True)),
    (16, 8192, Tile(32, 128, 4, 8)),
    (16, _MANY, Tile(64, 128, 4, 5)),
    (32, 8192, Tile(64, 128, 4, 4, splits=4)),
    (32, _MANY, Tile(64, 128, 4, 4)),
    (_MANY, 8192, Tile(64, 128, 4, 4, splits=4)),
    (_MANY, _MANY, Tile(128, 64, 8, 4)),
)
_SMALL_TILES = (
    (1, _MANY, Tile(4, 2048, 4, 1, is_vector=True)),
    (_MANY, _MANY, Tile(32, 128, 4, 4)),
)


@lru_cache
def tile_for(num_rows: int, num_columns: int, has_large_memory: bool) -> Tile:
    tiles = _TILES if has_large_memory else _SMALL_TILES
    return next(tile for rows, columns, tile in tiles if num_rows <= rows and num_columns <= columns)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernels multiply x [M, K] with the rows of `weight` [N, K]."""
    has_few = x.dim() == 2 and 0 < x.shape[0] <= MAX_ROWS and weight.numel() > 0
    return has_few and x.dtype == weight.dtype and x.dtype in DTYPES and x.stride(1) == 1 and weight.is_contiguous()


def multiply(
    out: Tensor, x: Tensor, weight: Tensor, add: bool = False, gated: bool = False, tile: Tile | None = None
) -> None:
    """out [M, N], dense, = or with `add` += x [M, K] @ weight.T, of tensors that `takes` accepts, or of more rows.

    `gated`: silu(gate) * up of that, where the first half of the weight's 2 * N rows is the gate's.
    """
    num_rows, width, num_columns = *x.shape, out.shape[1]
    tile = tile or tile_for(num_rows, weight.shape[0], has_large_shared_memory(x.device))
    # As many rows of the weight are read by a program.
    block_n, splits = (max(tile.block_n // 2, 1), 1) if gated else (tile.block_n, tile.splits)
    blocks = triton.cdiv(num_columns, block_n)
    sizes = {"WIDTH": width, "NUM_COLUMNS": num_columns, "BLOCK_N": block_n, "ADD": add, "GATED": gated}
    # Triton launches on the current device, whatever its arguments.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        if tile.is_vector:
            vector_kernel[(blocks,)](
                out, x, weight, x.stride(0), **sizes, ROWS=num_rows, BLOCK_M=triton.next_power_of_2(num_rows),
                BLOCK_K=min(tile.block_k, triton.next_power_of_2(width)), num_warps=tile.num_warps,
            )  # fmt: skip
            return
        block_m = max(16, triton.next_power_of_2(num_rows))
        partial = arrivals = out
        if splits > 1:
            partial = x.new_empty(blocks * splits * block_n * block_m, dtype=torch.float32)
            arrivals = _arrivals(x, blocks)
        matrix_kernel[(blocks * splits,)](
            out, x, weight, partial, arrivals, num_rows, x.stride(0), **sizes, BLOCK_M=block_m, BLOCK_K=tile.block_k,
            SPLITS=splits, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


_NUM_ZEROS = 1 << 20
_zeros: dict[torch.device, Tensor] = {}
"""By device: what no captured product has taken yet, a view that keeps the others as well. Each captured product keeps
its own for ever, as two graphs may run at once."""


def reserve_zeros(device: torch.device) -> None:
    """Where captured products count their programs, 4 MiB; call it outside captures. Without, each clears its own."""
    if device not in _zeros:
        _zeros[device] = torch.zeros(_NUM_ZEROS, dtype=torch.int32, device=device)


def _arrivals(x: Tensor, count: int) -> Tensor:
    """Zeros that nobody else uses, and that the kernel leaves as zeros."""
    left = _zeros.get(x.device)
    if left is None or len(left) < count or not torch.cuda.is_current_stream_capturing():
        return x.new_zeros(count, dtype=torch.int32)
    mine, _zeros[x.device] = left[:count], left[count:]
    return mine


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


def _gated_product(x: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    if takes(x, weight):
        multiply(out, x, weight, gated=True)
    elif out.numel():
        grid = (len(out), triton.cdiv(out.shape[1], _GATE_COLUMNS))
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            gate_kernel[grid](
                out, torch.mm(x, weight.t()), NUM_COLUMNS=out.shape[1], BLOCK_N=_GATE_COLUMNS, num_warps=4
            )  # fmt: skip
    return out


def _add_product(x: Tensor, left: Tensor, right: Tensor) -> None:
    rows = x.view(-1, x.shape[-1])
    if takes(left, right.t()) and rows.dtype == left.dtype:
        multiply(rows, left, right.t(), add=True)
    else:
        rows.addmm_(left, right)


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define("few_rows_product(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.define("gated_product(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.define("add_product_(Tensor(a!) x, Tensor left, Tensor right) -> ()")
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("few_rows_product", _few_rows_product, _key)
    _LIBRARY.impl("gated_product", _gated_product, _key)
    _LIBRARY.impl("add_product_", _add_product, _key)
_LIBRARY.impl("few_rows_product", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]), "Meta")
_LIBRARY.impl("gated_product", lambda x, weight: x.new_empty(x.shape[0], weight.shape[0] // 2), "Meta")
_LIBRARY.impl("add_product_", lambda x, left, right: None, "Meta")

few_rows_product: Any = torch.ops.breakgraph.few_rows_product.default
"""x [M, K] @ weight [N, K].T, any M: dense [M, N]. Up to MAX_ROWS rows each has bits that depend on it and on M alone,
sums in float32, rounded once."""

gated_product: Any = torch.ops.breakgraph.gated_product.default
"""x [M, K] and weight [2 * N, K], the gate's rows first: silu(x @ gate.T) * (x @ up.T), dense [M, N], any M."""

add_product: Any = torch.ops.breakgraph.add_product_.default
"""x [..., N], dense, += left [M, K] @ right [K, N], where x has M rows."""
