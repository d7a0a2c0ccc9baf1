# mypy: allow-untyped-defs, allow-incomplete-defs
"""The largest few of each row, in one kernel: what a router does to the scores of its experts.

Imported only where models are compiled: triton is not on every machine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS, MAX_K = 1024, 32
"""A row lies in the registers of one program, which goes over it once for each of the k."""
_ELEMENTS = 512
"""Of one program, in several rows where they are short."""


@triton.jit
def _top_k_kernel(
    values_ptr, indices_ptr, x_ptr, num_rows, row_stride,
    NUM_COLUMNS: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(num_rows / ROWS),). COLUMNS and BLOCK_K: NUM_COLUMNS and K, up to a power of two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    left = tl.broadcast_to(column < NUM_COLUMNS, (ROWS, COLUMNS))
    mask = (row < num_rows)[:, None] & left
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(left, x, -float("inf"))
    # Integers in the order of the floats: a warp finds the largest of integers in one instruction.
    key = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(x != x, 0x7FC00000, key ^ ((key >> 31) & 0x7FFFFFFF))  # NaN counts as the largest
    if SOFTMAX:
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
    place = tl.arange(0, BLOCK_K)[None, :]
    bits = x.to(tl.int32, bitcast=True)
    values = tl.zeros((ROWS, BLOCK_K), tl.int32)
    indices = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for i in range(K):
        best = tl.max(tl.where(left, key, -(1 << 31)), 1)[:, None]
        index = tl.min(tl.where(left & (key == best), column, COLUMNS), 1)[:, None]
        taken = column == index
        values = tl.where(place == i, tl.sum(tl.where(taken, bits, 0), 1)[:, None], values)
        indices = tl.where(place == i, index, indices)
        left = left & (column != index)
    out = row.to(tl.int64)[:, None] * K + place
    mask = (row < num_rows)[:, None] & (place < K)
    values = values.to(tl.float32, bitcast=True)
    if SHARES:
        values = values / tl.where(row < num_rows, tl.sum(values, 1), 1.0)[:, None]
    tl.store(values_ptr + out, values.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(indices_ptr + out, indices.to(tl.int64), mask=mask)


def _empty(
    x: Tensor, k: int, softmax: bool, shares: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (x.shape[0], k)
    dtype = dtype or (torch.float32 if softmax else x.dtype)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int64)


def _top_k(
    x: Tensor, k: int, softmax: bool, shares: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, num_columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    values, indices = _empty(x, k, softmax, shares, dtype)
    columns = triton.next_power_of_2(num_columns)
    rows = max(1, _ELEMENTS // columns)
    if num_rows:
        # Triton launches on the current device, whatever its arguments.
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            _top_k_kernel[(triton.cdiv(num_rows, rows),)](
                values, indices, x, num_rows, x.stride(0), NUM_COLUMNS=num_columns, K=k, SOFTMAX=softmax,
                SHARES=shares, ROWS=rows, COLUMNS=columns, BLOCK_K=triton.next_power_of_2(k), num_warps=4,
            )  # fmt: skip
    return values, indices


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define(
    "top_k(Tensor x, int k, bool softmax, bool shares=False, ScalarType? dtype=None) -> (Tensor, Tensor)"
)
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("top_k", _top_k, _key)
_LIBRARY.impl("top_k", _empty, "Meta")

top_k: Any = torch.ops.breakgraph.top_k.default
"""x [T, N] with any strides, N up to MAX_COLUMNS, k up to MAX_K and N: the k largest of each row, [T, k], the largest
first, and their columns, int64 [T, k]. Of equal ones that with the lower column comes first; NaN is larger than all.

With `softmax` the values are those of the row's softmax, in float32; otherwise those of x, in its dtype. With `shares`
each is divided by the sum of the k. `dtype`: what they are rounded to in the end.
"""
