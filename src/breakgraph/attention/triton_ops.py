"""One operator around the Triton kernels: stores the new keys and values, then attends from the block table.

An operator, not plain launches, so that captures see what the kernels read and write. It reads no length on the host,
its grids and its workspace depend on shapes alone: one captured graph serves any lengths that fit them.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from breakgraph.attention.base import DECODE, LayerAttention
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.step import AttentionStep
from breakgraph.attention.triton_decode import decode_kernel, merge_splits_kernel
from breakgraph.attention.triton_kernels import store_kernel, varlen_kernel
from breakgraph.attention.triton_launch import RepeatedLaunch

MAX_SPLITS = 128
MERGE_IN_DECODE = torch.version.hip is None
"""Whether decode merges its splits itself, which counts on the memory order of CUDA; else a kernel of its own does."""
_BUSY_PROGRAMS = 2
"""Decode programs on each multiprocessor that keep the memory busy, however many more would fit."""
_START_TILES = 1
"""What the start of a decode program costs, in key tiles."""
_RESIDENT_WARPS = 16
"""Those of decode on one multiprocessor, at 128 registers a thread."""
_SHARED_OVERHEAD = 7 * 1024
"""Shared memory of a decode program beside its stages."""
_MERGE_ELEMENTS = 8192
"""Of partial results, that a merge reads at a time."""


@dataclass(frozen=True)
class Tile:
    """How one program cuts its work. `block_m` counts queries times the query heads of one key head."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_tiles: int = 1
    """Decode: the fewest key tiles that are worth a split of their own."""
    max_registers: int | None = None


# By the padded columns of a key and a value together. Large: a program can have 224 KiB of shared memory, as on compute
# capability 9.0; small: 99 KiB. Float32 has no tensor cores to feed and spills registers: it is there for tests.
_VARLEN_LARGE = {
    128: Tile(128, 128, 8, 3), 256: Tile(128, 128, 8, 3), 384: Tile(128, 64, 8, 3), 512: Tile(128, 32, 8, 3),
}  # fmt: skip
_VARLEN_SMALL = {
    128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 3), 384: Tile(64, 32, 4, 2), 512: Tile(64, 16, 4, 2),
}  # fmt: skip
_VARLEN_FLOAT32 = {
    128: Tile(32, 16, 4, 2), 256: Tile(32, 16, 4, 2), 384: Tile(16, 16, 4, 2), 512: Tile(16, 16, 4, 2),
}  # fmt: skip
_DECODE_LARGE = {
    128: Tile(16, 128, 4, 3, 2), 256: Tile(16, 64, 2, 3, 4), 384: Tile(16, 32, 4, 3, 8), 512: Tile(16, 32, 4, 3, 8),
}  # fmt: skip
_DECODE_SMALL = {
    128: Tile(16, 64, 4, 3, 4), 256: Tile(16, 32, 4, 3, 8), 384: Tile(16, 32, 4, 2, 8), 512: Tile(16, 16, 4, 2, 16),
}  # fmt: skip
_DECODE_FLOAT32 = {
    128: Tile(16, 16, 4, 2, 16), 256: Tile(16, 16, 4, 2, 16), 384: Tile(16, 16, 4, 2, 16), 512: Tile(16, 16, 4, 2, 16),
}  # fmt: skip
_LARGE_SHARED_BYTES = 224 * 1024
# Heads of 128, few rows: smaller tiles, so that there is one for each multiprocessor. The largest first; where requests
# are taken to be short, some with one token, any number of rows is cut so.
_VARLEN_FEW = (Tile(64, 64, 4, 3), Tile(32, 128, 4, 2))


def padded(size: int) -> int:
    """The power of two that a tile spends on `size` columns; 16 is the least that tensor cores multiply."""
    return max(16, 1 << (size - 1).bit_length())


@lru_cache
def varlen_tile(
    columns: int, group: int, dtype: torch.dtype, large: bool, per_sm: float = math.inf, short: bool = False
) -> Tile:
    """For any number of queries a request.

    Args:
        columns: Those of a padded key and value together.
        per_sm: Rows of queries, each head counted, for a multiprocessor.
        short: Whether requests are taken to be short.
    """
    tile = _choose((_VARLEN_FLOAT32, _VARLEN_LARGE, _VARLEN_SMALL), columns, group, dtype, large)
    smaller = [few for few in _VARLEN_FEW if few.block_m >= padded(group)]
    if large and dtype != torch.float32 and columns == 256 and (short or per_sm < tile.block_m) and smaller:
        return next((few for few in smaller if per_sm >= few.block_m), smaller[-1])
    return tile


@lru_cache
def decode_tile(columns: int, group: int, dtype: torch.dtype, large: bool) -> Tile:
    """For one query a request. `columns` are those of a padded key and value together."""
    return _choose((_DECODE_FLOAT32, _DECODE_LARGE, _DECODE_SMALL), columns, group, dtype, large)


def _choose(tables: tuple[dict[int, Tile], ...], columns: int, group: int, dtype: torch.dtype, large: bool) -> Tile:
    table = tables[0 if dtype == torch.float32 else 1 if large else 2]
    tile = table[next(size for size in table if columns <= size)]
    return replace(tile, block_m=max(tile.block_m, padded(group)))


@lru_cache
def num_splits(rows: int, num_kv_heads: int, num_keys: int, num_sms: int, resident: int, tile: Tile) -> int:
    """Into how many parts a decode bucket cuts its longest request of `num_keys`; shorter ones may fill fewer.

    The cheapest for a batch of such requests, the coarsest of equals. `resident` programs run on a multiprocessor at a
    time. Those of the last round cost as much as _BUSY_PROGRAMS if they are fewer.
    """
    num_tiles, slots = triton.cdiv(num_keys, tile.block_n), num_sms * resident
    least = num_sms * min(_BUSY_PROGRAMS, resident)

    def cost(splits: int) -> int:
        share = triton.cdiv(num_tiles, splits)
        full, rest = divmod(rows * num_kv_heads * triton.cdiv(num_tiles, share), slots)
        return (share + _START_TILES) * (full * slots + (max(rest, least) if rest else 0))

    return min(range(1, min(max(1, num_tiles // tile.min_tiles), MAX_SPLITS) + 1), key=cost)


@dataclass(frozen=True)
class _Device:
    num_sms: int
    shared_bytes: int
    """Of a multiprocessor."""
    large: bool
    """Whether one program can have the shared memory of the large tiles."""

    def resident(self, tile: Tile, columns: int, dtype: torch.dtype) -> int:
        """Decode programs that a multiprocessor runs at a time, about."""
        shared = (tile.num_stages - 1) * tile.block_n * columns * dtype.itemsize + _SHARED_OVERHEAD
        return max(1, min(self.shared_bytes // shared, _RESIDENT_WARPS // tile.num_warps))


@lru_cache
def _device_facts(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(num_sms=4, shared_bytes=_LARGE_SHARED_BYTES, large=True)
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)  # ROCm does not tell
    return _Device(
        num_sms=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_multiprocessor", 64 * 1024),
        large=shared_bytes >= _LARGE_SHARED_BYTES,
    )


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether one program may take 224 KiB of it, as on compute capability 9.0."""
    return _device_facts(device).large


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    arrivals: torch.Tensor | None = None,
) -> None:
    """Also sets `arrivals` to zero, [rows, num_kv_heads] int32."""
    num_kv_heads, head_dim, v_head_dim = key_cache.shape[2], key_cache.shape[3], value_cache.shape[3]
    store_kernel[(k.shape[0],)](
        key_cache, value_cache, k, v, slots, slots if starts is None else starts,
        slots if arrivals is None else arrivals, 0 if starts is None else starts.shape[0] - 1,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim,
        BLOCK_H=triton.next_power_of_2(num_kv_heads), BLOCK_D=padded(head_dim), BLOCK_DV=padded(v_head_dim),
        STARTS=starts is not None, ARRIVALS=arrivals is not None, num_warps=4,
    )  # fmt: skip


class VarlenCall:
    """Attention of any number of queries a request over what is stored: one layer, on tensors that stay where they are.

    What their shapes and the places of `q` and `out` decide is worked out here, the rest at each call. The columns of a
    head are one piece, and there is a row at least.
    """

    def __init__(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        window: int | None,
        out: torch.Tensor,
        short: bool,
    ) -> None:
        num_rows, num_heads, _ = q.shape
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        v_head_dim, group, device = value_cache.shape[3], num_heads // num_kv_heads, _device_facts(q.device)
        per_sm = num_rows * num_heads / device.num_sms
        tile = varlen_tile(padded(head_dim) + padded(v_head_dim), group, q.dtype, device.large, per_sm, short)
        constants = num_kv_heads, group, head_dim, v_head_dim, block_size, window is not None, softcap is not None
        self._caches, self._sinks = (key_cache, value_cache), q if sinks is None else sinks
        dtypes = key_cache.dtype, value_cache.dtype, self._sinks.dtype
        self._launch = _LAUNCH_VARLEN.on(
            (q.device, tile, *dtypes, sinks is not None, *constants),
            (out, q, None, None, None, None, None, None),
            (*q.stride()[:2], *out.stride()[:2]),
            _varlen_options(tile, sinks is not None, *constants),
        )
        self._num_kv_heads, self._num_rows = num_kv_heads, num_rows
        self._num_tiles = num_rows // (tile.block_m // group) + 1
        self._last_numbers = window or 0, float(scale), float(softcap or 0.0)

    def __call__(self, tables: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor) -> None:
        """Fills `out`, for requests as :class:`RequestTensors` has them, int32."""
        num_reqs = starts.shape[0] - 1
        self._launch(
            (self._num_kv_heads * (self._num_tiles + num_reqs), 1, 1),
            (*self._caches, tables, seq_lens, starts, self._sinks),
            (num_reqs, self._num_rows, tables.stride(0), *self._last_numbers),
        )


_LAUNCH_VARLEN = RepeatedLaunch(varlen_kernel)


@lru_cache
def _varlen_options(
    tile: Tile, has_sinks: bool, num_kv_heads: int, group: int, head_dim: int, v_head_dim: int, block_size: int,
    has_window: bool, has_softcap: bool,
) -> dict[str, Any]:  # fmt: skip
    """The constants of the kernel, and how it is compiled."""
    return {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "V_HEAD_DIM": v_head_dim,
        "BLOCK_SIZE": block_size, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(head_dim), "BLOCK_DV": padded(v_head_dim),
        "WINDOW": has_window, "SOFTCAP": has_softcap, "SINKS": has_sinks,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers,
    }  # fmt: skip


def decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    seq_lens: torch.Tensor,
    arrivals: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """`arrivals`: zeros, [rows, num_kv_heads] int32, that are zeros again afterwards."""
    rows, num_heads, _ = q.shape
    block_size, num_kv_heads, head_dim, v_head_dim = *key_cache.shape[1:], value_cache.shape[3]
    group, columns, device = num_heads // num_kv_heads, padded(head_dim) + padded(v_head_dim), _device_facts(q.device)
    tile = decode_tile(columns, group, q.dtype, device.large)
    num_keys = tables.shape[1] * block_size
    if window is not None:
        num_keys = min(num_keys, window + tile.block_n - 1)
    resident = device.resident(tile, columns, q.dtype)
    splits = num_splits(rows, num_kv_heads, num_keys, device.num_sms, resident, tile)
    partial = q.new_empty((rows, num_heads, splits, v_head_dim) if splits > 1 else 0, dtype=torch.float32)
    peaks = q.new_empty((rows, num_heads, splits) if splits > 1 else 0, dtype=torch.float32)
    block_g = triton.next_power_of_2(group)
    common = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "V_HEAD_DIM": v_head_dim, "BLOCK_N": tile.block_n,
        "BLOCK_G": block_g, "BLOCK_DV": padded(v_head_dim), "MIN_TILES": tile.min_tiles,
        "SPLITS_AT_ONCE": max(1, min(16, _MERGE_ELEMENTS // (block_g * padded(v_head_dim)))),
        "WINDOW": window is not None,
    }  # fmt: skip
    decode_kernel[(num_kv_heads, splits, rows)](
        out, partial, peaks, arrivals, q, key_cache, value_cache, tables, seq_lens, q if sinks is None else sinks,
        splits, tables.stride(0), window or 0, scale, softcap or 0.0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=tile.block_m, BLOCK_D=padded(head_dim),
        MERGE=MERGE_IN_DECODE, SOFTCAP=softcap is not None, SINKS=sinks is not None, **common,
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
    )  # fmt: skip
    if splits > 1 and not MERGE_IN_DECODE:
        merge_splits_kernel[(num_kv_heads, rows)](
            out, partial, peaks, seq_lens, splits, window or 0, out.stride(0), out.stride(1), **common, num_warps=4,
        )  # fmt: skip


def _paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    out: torch.Tensor,
    stored: bool,
    short: bool,
) -> None:
    if not q.shape[0]:
        return
    # Triton launches on the current device, whatever its arguments.
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        if cu_seqlens_q is None:
            assert not stored, "a decode step stores its keys itself"
            # Fresh in each call, as the other workspace: calls on two streams share nothing.
            arrivals = seq_lens.new_empty((q.shape[0], key_cache.shape[2]), dtype=torch.int32)
            store(k, v, slots, None, key_cache, value_cache, arrivals)
            decode(q, key_cache, value_cache, block_tables, seq_lens, arrivals, sinks, scale, softcap, window, out)
        else:
            if not stored:
                store(k, v, slots, cu_seqlens_q, key_cache, value_cache)
            call = VarlenCall(q, key_cache, value_cache, sinks, scale, softcap, window, out, short)
            call(block_tables, seq_lens, cu_seqlens_q)


def _store_kv(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, num_live: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor,
) -> None:  # fmt: skip
    """Rows from `num_live` [1] on store nothing."""
    with torch.cuda.device(k.device) if k.is_cuda else nullcontext():
        store(k, v, slots, num_live, key_cache, value_cache)


_LIBRARY = torch.library.Library("breakgraph", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor slots, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor block_tables, Tensor seq_lens, Tensor? cu_seqlens_q, Tensor? sinks, float scale, float? softcap, "
    "int? window, Tensor(c!) out, bool stored, bool short) -> ()"
)
_LIBRARY.define(
    "store_kv(Tensor k, Tensor v, Tensor slots, Tensor num_live, Tensor(a!) key_cache, Tensor(b!) value_cache) -> ()"
)
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("paged_attention", _paged_attention, _key)
    _LIBRARY.impl("store_kv", _store_kv, _key)
for _name in ("paged_attention", "store_kv"):
    _LIBRARY.impl(_name, lambda *args: None, "Meta")

paged_attention: Any = torch.ops.breakgraph.paged_attention.default
"""Stores k and v [T, Hk, D(v)] at `slots` [T], then fills every row of `out` [T, H, Dv].

Without `cu_seqlens_q` each row is the last token of one request. With it, [R + 1], rows behind the last request are
zero and store nothing. A request of length 0 gives zeros. With `stored` the keys and values are there already.
`short` is how :func:`varlen_tile` takes it.
"""


def store_in_bucket(
    k: torch.Tensor, v: torch.Tensor, step: AttentionStep, kv: KVCacheBuffers, layer: LayerAttention
) -> bool:
    """What :meth:`AttentionBackend.store` does: the live rows of a step whose rows lie in static tensors."""
    if step.phase == DECODE or step.fixed_slots or step.num_tokens_gpu is None:
        return False
    torch.ops.breakgraph.store_kv.default(
        dense_heads(k), dense_heads(v), step.slot_mapping_gpu, step.num_tokens_gpu,
        kv.key[layer.layer_id], kv.value[layer.layer_id],
    )  # fmt: skip
    return True


def dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Rows and heads may lie anywhere; the kernels take the columns of a head as one piece."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
