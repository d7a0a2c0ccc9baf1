# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of decode: one query a request, its keys split among programs, and the splits merged."""

from __future__ import annotations

import triton
import triton.language as tl

from breakgraph.attention.triton_kernels import LOWEST, attend_range, start_rows


@triton.jit
def _split_tiles(
    seq_len, window, num_splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """First visible key of a request's last token, tiles a split, and splits that have any."""
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(seq_len - window, 0)
    num_tiles = tl.cdiv(seq_len, BLOCK_N) - first_key // BLOCK_N
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES)
    return first_key, share, tl.cdiv(num_tiles, share)


@triton.jit
def _merge_heads(
    out_ptr, partial_ptr, peaks_ptr, row, kv_head, num_used, num_splits, out_stride, out_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The splits of a row, in their order, for the query heads of one key head."""
    group = tl.arange(0, BLOCK_G)
    live = group < GROUP
    heads = kv_head * GROUP + group
    v_dims = tl.arange(0, BLOCK_DV)
    columns = v_dims < V_HEAD_DIM
    first = (row * (NUM_KV_HEADS * GROUP) + heads) * num_splits
    acc = tl.zeros((BLOCK_G, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    peak = tl.full((BLOCK_G,), LOWEST, tl.float32)
    for base in range(0, num_used, SPLITS_AT_ONCE):
        split = base + tl.arange(0, SPLITS_AT_ONCE)
        used = (split < num_used)[:, None] & live[None, :]
        places = first[None, :] + split[:, None]
        # Other multiprocessors wrote them: from L2.
        peaks = tl.load(peaks_ptr + places, mask=used, other=LOWEST, cache_modifier=".cg")
        parts = tl.load(
            partial_ptr + places[:, :, None] * V_HEAD_DIM + v_dims[None, None, :],
            mask=used[:, :, None] & columns[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        peak = new_peak
    out_ptrs = out_ptr + row * out_stride + (heads * out_head_stride)[:, None] + v_dims[None, :]
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None] & columns[None, :])


@triton.jit(do_not_specialize=["num_splits", "window", "table_stride"])
def decode_kernel(
    out_ptr, partial_ptr, peaks_ptr, arrivals_ptr, q_ptr, key_ptr, value_ptr, tables_ptr, seq_lens_ptr, sinks_ptr,
    num_splits, table_stride, window, scale, softcap,
    q_stride, q_head_stride, out_stride, out_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_G: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr, MERGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One query a row: the last token of each request. Grid: (NUM_KV_HEADS, num_splits, rows).

    A request in one split writes `out`. Others leave a normalised result and the base 2 logarithm of its weight for
    each split, [rows, heads, num_splits, V_HEAD_DIM] and [rows, heads, num_splits]. With MERGE the last program of a
    row and key head to get there merges its splits; `arrivals`, [rows, NUM_KV_HEADS], are zero before and after.
    Without, merge_splits_kernel does.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + row)
    first_key, share, num_used = _split_tiles(seq_len, window, num_splits, BLOCK_N, MIN_TILES, WINDOW)
    if split >= tl.maximum(num_used, 1):
        return

    group = tl.arange(0, BLOCK_M)
    live = group < GROUP
    heads = kv_head * GROUP + group
    v_dims = tl.arange(0, BLOCK_DV)[None, :]
    out_ptrs = out_ptr + row * out_stride + (heads * out_head_stride)[:, None] + v_dims
    out_mask = live[:, None] & (v_dims < V_HEAD_DIM)
    if seq_len == 0:
        tl.store(out_ptrs, tl.zeros((BLOCK_M, BLOCK_DV), out_ptr.dtype.element_ty), mask=out_mask)
        return

    dims = tl.arange(0, BLOCK_D)[None, :]
    q_ptrs = q_ptr + row * q_stride + (heads * q_head_stride)[:, None] + dims
    q = tl.load(q_ptrs, mask=live[:, None] & (dims < HEAD_DIM), other=0.0)
    first = first_key // BLOCK_N + split * share
    end = tl.minimum(first + share, tl.cdiv(seq_len, BLOCK_N))
    full_from = tl.minimum(tl.maximum(tl.cdiv(first_key, BLOCK_N), first), end)
    full_end = tl.maximum(tl.minimum(seq_len // BLOCK_N, end), full_from)
    peak, total = start_rows(sinks_ptr, heads, live, SINKS)
    if SINKS:
        # Counted once, by the first split.
        peak = tl.where(split == 0, peak, LOWEST)
        total = tl.where(split == 0, total, 0.0)
    acc, total, peak = attend_range(
        q, tl.zeros((BLOCK_M, BLOCK_DV), tl.float32), total, peak,
        key_ptr + kv_head * HEAD_DIM, value_ptr + kv_head * V_HEAD_DIM, tables_ptr + row * table_stride,
        first, end, full_from, full_end,
        tl.full((BLOCK_M,), 0, tl.int32) + (seq_len - 1), first_key, seq_len, window, scale, softcap,
        NUM_KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP,
    )  # fmt: skip
    result = acc / total[:, None]
    if num_used == 1:
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        place = (row * (NUM_KV_HEADS * GROUP) + heads) * num_splits + split
        tl.store(partial_ptr + place[:, None] * V_HEAD_DIM + v_dims, result, mask=out_mask)
        tl.store(peaks_ptr + place, peak + tl.log2(total), mask=live)
        if MERGE:
            arrivals_ptr += row * NUM_KV_HEADS + kv_head
            # All threads have stored before one of them counts: its release covers them.
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_used - 1:
                _merge_heads(
                    out_ptr, partial_ptr, peaks_ptr, row, kv_head, num_used, num_splits, out_stride, out_head_stride,
                    NUM_KV_HEADS, GROUP, V_HEAD_DIM, BLOCK_G, BLOCK_DV, SPLITS_AT_ONCE,
                )  # fmt: skip
                tl.store(arrivals_ptr, 0)


@triton.jit(do_not_specialize=["num_splits", "window"])
def merge_splits_kernel(
    out_ptr, partial_ptr, peaks_ptr, seq_lens_ptr, num_splits, window, out_stride, out_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_DV: tl.constexpr, MIN_TILES: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """What decode_kernel without MERGE left. Grid: (NUM_KV_HEADS, rows)."""
    row = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + row)
    _, _, num_used = _split_tiles(seq_len, window, num_splits, BLOCK_N, MIN_TILES, WINDOW)
    if num_used > 1:
        _merge_heads(
            out_ptr, partial_ptr, peaks_ptr, row, tl.program_id(0), num_used, num_splits, out_stride, out_head_stride,
            NUM_KV_HEADS, GROUP, V_HEAD_DIM, BLOCK_G, BLOCK_DV, SPLITS_AT_ONCE,
        )  # fmt: skip
