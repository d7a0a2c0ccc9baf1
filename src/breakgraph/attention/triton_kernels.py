# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels: the softmax over key tiles that all share, any number of queries a request, and the cache write.

Only triton_ops.py imports kernels: triton is not on every machine.

Rows of a score tile are queries times the query heads that share a key head, so that one key tile serves them all.
Softmax is online, in float32 and base 2. A tile of keys is BLOCK_N positions from a multiple of BLOCK_N on. Which tiles
a query visits, and in which order, depends on its own request alone; hence in steps of as many rows, as those of a
bucket are, so does every bit of its result. The caches are contiguous, [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM
or V_HEAD_DIM].
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite, so that a row that sees nothing of a tile gives no NaN.
HIDDEN = tl.constexpr(-1.0e30)
# The maximum before the first key: below HIDDEN in any scale.
LOWEST = tl.constexpr(-3.0e38)
REQUESTS_AT_ONCE = tl.constexpr(256)


@triton.jit
def _tile_positions(index, gap_at, gap, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    tile = index
    if MASKED:
        tile += tl.where(index >= gap_at, gap, 0)
    return tile * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _load_blocks(table_ptr, positions, end_key, BLOCK_SIZE: tl.constexpr):
    """Block of each position; from `end_key` on, where the table may end, the last key's block."""
    # Unsigned: a shift, where the signed quotient would take a correction.
    return tl.load(table_ptr + tl.minimum(positions, end_key - 1).to(tl.uint32) // BLOCK_SIZE)


@triton.jit
def _load_columns(ptrs, dims, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    return tl.load(ptrs) if SIZE == BLOCK else tl.load(ptrs, mask=dims < SIZE, other=0.0)


@triton.jit
def _soften(scores, softcap):
    # tanh(x) = 1 - 2 / (exp(2x) + 1), which goes to its ends without NaN.
    return softcap - 2 * softcap / (tl.exp2(scores * (2 * LOG2_E / softcap)) + 1)


@triton.jit
def _attend_tiles(
    q, acc, total, peak, key_ptr, value_ptr, table_ptr, first, end, gap_at, gap,
    query_pos, first_key, end_key, window, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds tiles `first` to `end` to the running softmax; from number `gap_at` on, they lie `gap` tiles further."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    v_dims = tl.arange(0, BLOCK_DV)[None, :]
    exponent = LOG2_E if SOFTCAP else scale * LOG2_E
    positions = _tile_positions(first, gap_at, gap, BLOCK_N, MASKED)
    blocks = _load_blocks(table_ptr, positions, end_key, BLOCK_SIZE)
    for index in tl.range(first, end):
        # Unsigned before it grows: one instruction then makes an address of it.
        slots = (blocks * BLOCK_SIZE + (positions & (BLOCK_SIZE - 1))).to(tl.uint32).to(tl.int64)
        here = positions
        # One tile ahead of its use, so that the addresses of keys do not wait for the table.
        positions = _tile_positions(index + 1, gap_at, gap, BLOCK_N, MASKED)
        blocks = _load_blocks(table_ptr, positions, end_key, BLOCK_SIZE)
        keys = _load_columns(key_ptr + (slots * (NUM_KV_HEADS * HEAD_DIM))[:, None] + dims, dims, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if SOFTCAP:
            scores = _soften(scores * scale, softcap)
        if MASKED:
            visible = here[None, :] <= query_pos[:, None]
            if WINDOW:
                visible &= here[None, :] > query_pos[:, None] - window
            scores = tl.where(visible, scores, HIDDEN)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * exponent)
        reference = new_peak
        if MASKED:
            # A row that has seen nothing yet: its maximum is a hidden score, and the fused multiply-add below would
            # leave the rounding error of that huge number, of either sign, as the exponent.
            reference = tl.where(new_peak > HIDDEN * exponent * 0.5, new_peak, 0.0)
        weights = tl.exp2(scores * exponent - reference[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        peak = new_peak
        value_ptrs = value_ptr + (slots * (NUM_KV_HEADS * V_HEAD_DIM))[:, None] + v_dims
        if MASKED:
            # A slot that nobody filled may hold NaN, which a weight of 0 does not hide.
            filled = (here >= first_key) & (here < end_key)
            values = tl.load(value_ptrs, mask=filled[:, None] & (v_dims < V_HEAD_DIM), other=0.0)
        else:
            values = _load_columns(value_ptrs, v_dims, V_HEAD_DIM, BLOCK_DV)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, total, peak


@triton.jit
def attend_range(
    q, acc, total, peak, key_ptr, value_ptr, table_ptr, first, end, full_from, full_end,
    query_pos, first_key, end_key, window, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds tiles `first` to `end`: those that every row sees whole without masks, then the others at both ends."""
    acc, total, peak = _attend_tiles(
        q, acc, total, peak, key_ptr, value_ptr, table_ptr, full_from, full_end, 0, 0,
        query_pos, first_key, end_key, window, scale, softcap,
        NUM_KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, MASKED=False,
    )  # fmt: skip
    num_full = full_end - full_from
    return _attend_tiles(
        q, acc, total, peak, key_ptr, value_ptr, table_ptr, first, end - num_full,
        full_from, num_full, query_pos, first_key, end_key, window, scale, softcap,
        NUM_KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP, MASKED=True,
    )  # fmt: skip


@triton.jit
def start_rows(sinks_ptr, heads, live, SINKS: tl.constexpr):
    """The running maximum and sum before the first key: a sink counts as a key without a value."""
    if SINKS:
        peak = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        return peak, tl.full(heads.shape, 1.0, tl.float32)
    return tl.full(heads.shape, LOWEST, tl.float32), tl.zeros(heads.shape, tl.float32)


@triton.jit
def _find_request(starts_ptr, num_reqs, tile, QUERIES: tl.constexpr):
    """The request of a query tile; `num_reqs` for the padding rows behind the last.

    Request r owns tiles from starts[r] // QUERIES + r on: as many as it needs, or one more.
    """
    found = 0
    for base in range(0, num_reqs + 1, REQUESTS_AT_ONCE):
        request = base + tl.arange(0, REQUESTS_AT_ONCE)
        starts = tl.load(starts_ptr + request, mask=request <= num_reqs, other=0)
        found += tl.sum(((request <= num_reqs) & (starts // QUERIES + request <= tile)).to(tl.int32))
    return found - 1


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "window", "table_stride"])
def varlen_kernel(
    out_ptr, q_ptr, key_ptr, value_ptr, tables_ptr, seq_lens_ptr, starts_ptr, sinks_ptr,
    num_reqs, num_rows, table_stride, window, scale, softcap,
    q_stride, q_head_stride, out_stride, out_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Any number of queries a request. Grid: NUM_KV_HEADS * (num_rows // QUERIES + num_reqs + 1) programs."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    # Late tiles see the most keys: they start first.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    request = _find_request(starts_ptr, num_reqs, tile, QUERIES)
    start = tl.load(starts_ptr + request)
    seq_len = tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    stop = tl.load(starts_ptr + request + 1, mask=request < num_reqs, other=num_rows)
    first_query = (tile - start // QUERIES - request) * QUERIES
    num_queries = stop - start
    if first_query >= num_queries:
        return

    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    live = (query < num_queries) & (rows < QUERIES * GROUP)
    tokens = (start + query).to(tl.int64)
    v_dims = tl.arange(0, BLOCK_DV)[None, :]
    out_ptrs = out_ptr + (tokens * out_stride + heads * out_head_stride)[:, None] + v_dims
    out_mask = live[:, None] & (v_dims < V_HEAD_DIM)
    if seq_len == 0:
        tl.store(out_ptrs, tl.zeros((BLOCK_M, BLOCK_DV), out_ptr.dtype.element_ty), mask=out_mask)
        return

    dims = tl.arange(0, BLOCK_D)[None, :]
    q_ptrs = q_ptr + (tokens * q_stride + heads * q_head_stride)[:, None] + dims
    q = tl.load(q_ptrs, mask=live[:, None] & (dims < HEAD_DIM), other=0.0)
    first_pos = seq_len - num_queries + first_query
    last_pos = seq_len - num_queries + tl.minimum(first_query + QUERIES, num_queries) - 1
    first_key = 0
    full_from = 0
    if WINDOW:
        first_key = tl.maximum(first_pos - window + 1, 0)
        full_from = tl.cdiv(tl.maximum(last_pos - window + 1, 0), BLOCK_N)
    first = first_key // BLOCK_N
    full_end = tl.maximum((first_pos + 1) // BLOCK_N, full_from)
    peak, total = start_rows(sinks_ptr, heads, live, SINKS)
    acc, total, peak = attend_range(
        q, tl.zeros((BLOCK_M, BLOCK_DV), tl.float32), total, peak,
        key_ptr + kv_head * HEAD_DIM, value_ptr + kv_head * V_HEAD_DIM,
        tables_ptr + request.to(tl.int64) * table_stride,
        first, tl.cdiv(last_pos + 1, BLOCK_N), full_from, full_end,
        seq_len - num_queries + query, first_key, last_pos + 1, window, scale, softcap,
        NUM_KV_HEADS, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, SOFTCAP,
    )  # fmt: skip
    # Rows that are no query may have seen nothing; they are not stored.
    total = tl.where(live, total, 1.0)
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_reqs"])
def store_kernel(
    key_ptr, value_ptr, k_ptr, v_ptr, slots_ptr, starts_ptr, arrivals_ptr, num_reqs,
    k_stride, k_head_stride, v_stride, v_head_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    STARTS: tl.constexpr, ARRIVALS: tl.constexpr,
):  # fmt: skip
    """New keys and values to their slots. Grid: (rows,); with STARTS, rows behind the last request store nothing.

    With ARRIVALS it also sets the counters of the decode that follows, [rows, NUM_KV_HEADS], to zero.
    """
    token = tl.program_id(0).to(tl.int64)
    if ARRIVALS:
        counters = tl.arange(0, BLOCK_H)
        zeros = tl.zeros((BLOCK_H,), tl.int32)
        tl.store(arrivals_ptr + token * NUM_KV_HEADS + counters, zeros, mask=counters < NUM_KV_HEADS)
    if token >= (tl.load(starts_ptr + num_reqs) if STARTS else tl.num_programs(0)):
        return
    slot = tl.load(slots_ptr + token)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    k = tl.load(k_ptr + token * k_stride + heads * k_head_stride + dims, mask=mask)
    tl.store(key_ptr + (slot * NUM_KV_HEADS + heads) * HEAD_DIM + dims, k, mask=mask)
    v_dims = tl.arange(0, BLOCK_DV)[None, :]
    v_mask = (heads < NUM_KV_HEADS) & (v_dims < V_HEAD_DIM)
    v = tl.load(v_ptr + token * v_stride + heads * v_head_stride + v_dims, mask=v_mask)
    tl.store(value_ptr + (slot * NUM_KV_HEADS + heads) * V_HEAD_DIM + v_dims, v, mask=v_mask)
