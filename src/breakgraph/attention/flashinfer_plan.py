"""What FlashInfer is told about a step, computed on the host: lengths, pages, groups of layers, workspace sizes.

A page is a block of the KV cache. Nothing here needs the package or a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from breakgraph.attention.base import LayerAttention
from breakgraph.attention.refusals import capability_refusal, device_refusal, dtype_refusal, value_size_refusal
from breakgraph.attention.step import HostTables

HEAD_DIMS = (64, 128, 256)
MIN_CAPABILITY = (8, 0)
FA3_CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)

Family = Literal["fa2", "fa3"]
"""FlashInfer's kernels: fa2 splits long requests over multiprocessors, fa3 is for compute capability 9.0 alone."""
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PlanConstants:
    """What one plan of FlashInfer is made for: layers that agree in it share the plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def window_left(self) -> int:
        """How many tokens before its own a query sees; -1: all."""
        return -1 if self.window is None else self.window - 1

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads


def constants_of(layer: LayerAttention) -> PlanConstants:
    return PlanConstants(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        has_sinks=layer.sinks is not None,
    )


def refusal(layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve the layer, or None."""
    if refused := device_refusal(device) or dtype_refusal(dtype, DTYPES) or value_size_refusal(layer):
        return refused
    if layer.head_dim not in HEAD_DIMS:
        return f"its head sizes are {', '.join(map(str, HEAD_DIMS))}, not {layer.head_dim}"
    if layer.num_heads % layer.num_kv_heads:
        return (
            "each of its key heads serves the same number of query heads, "
            f"not {layer.num_heads} for {layer.num_kv_heads}"
        )
    if layer.sinks is not None and layer.softcap is not None:
        return "it has no softcap beside attention sinks"
    return capability_refusal(device, MIN_CAPABILITY)


@dataclass(frozen=True)
class StepLayout:
    """A step in FlashInfer's terms, all int32."""

    qo_indptr: Ints
    """[R + 1], running sum of new tokens."""
    kv_indptr: Ints
    """[R + 1], running sum of pages."""
    last_page_len: Ints
    """[R], tokens in the last page; 0 for a request without tokens."""
    seq_lens: Ints
    """[R]"""
    page_positions: Ints
    """[number of pages], where each page stands in the flattened block table, request by request."""
    max_q_len: int

    @property
    def num_pages(self) -> int:
        return len(self.page_positions)

    def pages_of(self, tables: HostTables) -> Ints:
        """[number of pages], the pages themselves, from R rows of a block table on the host."""
        counts = np.diff(self.kv_indptr)
        rows = (np.asarray(row[:count], np.int32) for row, count in zip(tables, counts, strict=True))
        return np.concatenate(list(rows))


def lay_out(q_lens: Sequence[int], seq_lens: Sequence[int], block_size: int, table_width: int) -> StepLayout:
    """The layout of R requests with `q_lens` new and `seq_lens` total tokens, in a block table of `table_width`.

    A length of 0 is an unused request slot: no page.
    """
    totals = np.asarray(seq_lens, dtype=np.int32)
    pages = -(-totals // block_size)
    assert not len(pages) or pages.max() <= table_width, f"{pages.max()} pages in a block table of {table_width}"
    kv_indptr = _running_sum(pages)
    # A page's place in its row is its place among all pages less those of the rows before.
    shift = np.arange(len(pages), dtype=np.int32) * table_width - kv_indptr[:-1]
    return StepLayout(
        qo_indptr=_running_sum(np.asarray(q_lens, dtype=np.int32)),
        kv_indptr=kv_indptr,
        last_page_len=totals - np.maximum(pages - 1, 0) * block_size,
        seq_lens=totals,
        page_positions=np.repeat(shift, pages) + np.arange(kv_indptr[-1], dtype=np.int32),
        max_q_len=max(q_lens, default=0),
    )


def _running_sum(values: NDArray[Any]) -> Ints:
    sums = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(values, out=sums[1:])
    return sums


def fill_slots(lens: Sequence[int], num_slots: int, unused: int) -> tuple[int, ...]:
    """The lengths of the live requests, and of the slots behind them."""
    assert len(lens) <= num_slots, f"{len(lens)} requests in {num_slots} slots"
    return (*lens, *(unused,) * (num_slots - len(lens)))


@dataclass(frozen=True)
class FixedShape:
    """What stays the same in all plans that one graph is replayed with."""

    num_rows: int
    num_slots: int
    table_width: int

    @property
    def max_pages(self) -> int:
        return self.num_slots * self.table_width


def float_workspace_bytes(
    constants: PlanConstants, family: Family, fixed: FixedShape | None, num_multiprocessors: int
) -> int:
    """Bytes for the partial results of split requests: float32, a row of values and a sum for each query and head.

    fa3 splits none. fa2 (0.6) cuts at most two tiles a multiprocessor and key head; in graph mode it reserves room for
    all tiles that the rows may make.
    """
    least = 1 << 20
    if family == "fa3":
        return least
    tiles, tile_q = 2 * num_multiprocessors // constants.num_kv_heads + 1, 128
    if fixed is not None:
        longest = (fixed.num_rows - fixed.num_slots + 1) * constants.group
        tile_q = 16 if longest <= 16 else 64 if longest <= 64 or constants.head_dim >= 256 else 128
        tiles = max(tiles, -(-fixed.num_rows * constants.group // tile_q) + fixed.num_slots)
    return least + constants.num_heads * tiles * tile_q * (constants.head_dim + 1) * 4


def int_workspace_bytes(
    constants: PlanConstants, family: Family, fixed: FixedShape | None, num_multiprocessors: int
) -> int:
    """Bytes for the list of tiles that a plan writes; without `fixed` what FlashInfer itself takes, 8 MiB."""
    if fixed is None:
        return 8 << 20
    rows, slots = fixed.num_rows, fixed.num_slots
    if family == "fa3":
        works = -(-rows // (192 if constants.head_dim == 64 else 128)) + slots - 1
        heads = constants.num_heads if works <= 4096 else 1
        return (1 << 16) + 7 * 4 * works * heads
    tiles = max(2 * num_multiprocessors, -(-rows * constants.group // 16)) + slots
    return (1 << 16) + 13 * tiles + 8 * (rows + slots)
