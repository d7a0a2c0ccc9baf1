"""Reference attention in plain torch: any device, every feature, float32 inside.

Three forms. The ragged one walks over the requests by their host lengths and runs in breaks or eager steps. The other
two read all lengths on the device and have shapes that depend on the bucket alone, so one graph serves any batch; they
pay for the block table's full width, whatever the lengths. The decode one takes one query per row; the slotted one
takes every row for every request slot, and keeps of it what belongs to the slot.
"""

from __future__ import annotations

import torch

from breakgraph.attention.base import DECODE, AttentionBackend, AttentionMetadata, GraphSupport, LayerAttention
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.step import AttentionStep

MAX_SCORES = 1 << 26
"""Elements of the largest temporary (256 MiB in float32): queries or rows are taken in chunks that stay below it."""

_MASKED = torch.finfo(torch.float32).min


class SdpaAttention(AttentionBackend):
    name: str = "sdpa"

    @classmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def graph_support(self, phase: str) -> GraphSupport:
        return "decode" if phase == DECODE else "varlen"

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        if step.phase == DECODE:
            step.assert_one_token_a_row()
        elif step.fixed_slots:
            assert step.cu_seqlens_q_gpu is not None, f"request slots of a {step.phase!r} step without cu_seqlens_q_gpu"
        else:
            assert step.q_lens or not step.num_tokens, f"phase {step.phase!r} needs the host lengths of its requests"
        return AttentionMetadata(step, self)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerAttention,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        stored: bool = False,
    ) -> None:
        assert not stored, f"attention {self.name!r} writes the cache itself"
        step = metadata.step
        if step.phase == DECODE or step.fixed_slots:
            self.kv.write(layer.layer_id, step.slot_mapping_gpu, k, v)
            attention = decode_attention if step.phase == DECODE else slot_attention
            attention(q, layer, step, self.kv, out)
            return
        live = step.num_tokens
        self.kv.write(layer.layer_id, step.slot_mapping_gpu[:live], k[:live], v[:live])
        ragged_attention(q, layer, step, self.kv, out)
        if live < step.padded_num_tokens:
            out[live:].zero_()


def ragged_attention(
    q: torch.Tensor, layer: LayerAttention, step: AttentionStep, kv: KVCacheBuffers, out: torch.Tensor
) -> None:
    """Fills the live rows of `out` request by request; the step's keys and values are in the cache already."""
    start = 0
    for request, (num_new, num_total) in enumerate(zip(step.q_lens, step.seq_lens, strict=True)):
        num_cached = num_total - num_new
        # A window hides every block before the first query's own.
        first_block = 0 if layer.window is None else max(0, num_cached - layer.window + 1) // kv.block_size
        last_block = -(-num_total // kv.block_size)
        first_key = first_block * kv.block_size
        keys, values = kv.read_blocks(layer.layer_id, step.block_tables_gpu[request, first_block:last_block])
        keys, values = _as_float32(keys.movedim(0, 1)), _as_float32(values.movedim(0, 1))  # [Hk, L, D]
        chunk = max(1, MAX_SCORES // (layer.num_heads * keys.shape[1]))
        for row in range(0, num_new, chunk):
            num_rows = min(chunk, num_new - row)
            query_pos = num_cached + row
            begin = 0 if layer.window is None else max(0, query_pos - layer.window + 1 - first_key)
            end = query_pos + num_rows - first_key
            visible = _causal(query_pos, num_rows, first_key + begin, end - begin, layer.window, q.device)
            rows = slice(start + row, start + row + num_rows)
            out[rows] = masked_attention(
                _group_heads(q[rows], layer)[None], keys[None, :, begin:end], values[None, :, begin:end], visible, layer
            )[0]
        start += num_new


def decode_attention(
    q: torch.Tensor, layer: LayerAttention, step: AttentionStep, kv: KVCacheBuffers, out: torch.Tensor
) -> None:
    """Fills all rows of `out`, one query each. Reads nothing on the host and no shape depends on the lengths."""
    blocks, positions = _decode_blocks(layer, step, kv.block_size)
    lens = step.seq_lens_gpu[:, None]
    visible = positions < lens  # [R, width]
    if layer.window is not None:
        visible &= positions >= lens - layer.window
    num_rows, width = visible.shape
    per_row = width * max(layer.num_heads, layer.num_kv_heads * max(layer.head_dim, layer.v_head_dim))
    chunk = max(1, MAX_SCORES // per_row)
    for row in range(0, num_rows, chunk):
        rows = slice(row, min(row + chunk, num_rows))
        keys, values = kv.read_blocks(layer.layer_id, blocks[rows].flatten())
        keys = _as_float32(keys.unflatten(0, (-1, width)).movedim(1, 2))  # [r, Hk, width, D]
        values = _as_float32(values.unflatten(0, (-1, width)).movedim(1, 2))
        seen = visible[rows]
        # What a hidden slot holds is another request's, or nobody's: even NaN there must not reach this row.
        values = values.masked_fill(~seen[:, None, :, None], 0.0)
        queries = q[rows].unflatten(1, (layer.num_kv_heads, -1))[:, :, :, None]  # [r, Hk, G, 1, D]
        out[rows] = masked_attention(queries, keys, values, seen[:, None, None, None], layer)[:, 0]


def slot_attention(
    q: torch.Tensor, layer: LayerAttention, step: AttentionStep, kv: KVCacheBuffers, out: torch.Tensor
) -> None:
    """Fills all rows of `out` slot by slot; rows of no slot become zero. Reads nothing on the host."""
    starts = step.cu_seqlens_q_gpu
    assert starts is not None
    num_tokens, width = q.shape[0], step.block_tables_gpu.shape[1] * kv.block_size
    rows = torch.arange(num_tokens, device=q.device)
    key_pos = torch.arange(width, device=q.device)
    chunk = max(1, MAX_SCORES // (layer.num_heads * width))
    out.zero_()
    for slot in range(step.block_tables_gpu.shape[0]):
        start, end, seq_len = starts[slot : slot + 1], starts[slot + 1 : slot + 2], step.seq_lens_gpu[slot : slot + 1]
        mine = (rows >= start) & (rows < end)  # [T]
        query_pos = (seq_len - end + rows)[:, None]  # the last row of the slot is its request's last token
        visible = mine[:, None] & (key_pos <= query_pos)  # [T, width]
        if layer.window is not None:
            visible &= key_pos > query_pos - layer.window
        keys, values = kv.read_blocks(layer.layer_id, step.block_tables_gpu[slot])
        keys, values = _as_float32(keys.movedim(0, 1))[None], _as_float32(values.movedim(0, 1))  # [Hk, width, D]
        # What lies beyond the request is another's, or nobody's: even NaN there must not reach a row.
        values = values.masked_fill((key_pos >= seq_len)[:, None], 0.0)[None]
        for row in range(0, num_tokens, chunk):
            some = slice(row, row + chunk)
            attended = masked_attention(_group_heads(q[some], layer)[None], keys, values, visible[some], layer)[0]
            out[some] = torch.where(mine[some, None, None], attended.to(out.dtype), out[some])


def _decode_blocks(layer: LayerAttention, step: AttentionStep, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks to read, [R, N], and the positions of their slots, [R or 1, N * block_size].

    A window needs only the few blocks that it can touch; which ones depends on the lengths, how many does not.
    """
    tables = step.block_tables_gpu
    num_blocks = tables.shape[1]
    offsets = torch.arange(block_size, device=tables.device)
    columns = torch.arange(num_blocks, device=tables.device)[None]
    if layer.window is not None:
        first = (step.seq_lens_gpu[:, None] - layer.window).clamp(min=0) // block_size
        columns = first + columns[:, : (layer.window + block_size - 2) // block_size + 1]
        # Columns beyond the table read its last block; their positions are beyond every length, hence hidden.
        tables = tables.gather(1, columns.clamp(max=num_blocks - 1))
    return tables, (columns[:, :, None] * block_size + offsets).flatten(1)


def masked_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, layer: LayerAttention
) -> torch.Tensor:
    """Softmax attention in float32; G query heads share a key head, none is repeated.

    Args:
        queries: [B, Hk, G, C, D], any floating type.
        keys: [B, Hk, L, D] float32.
        values: [B, Hk, L, Dv] float32, zero where no query may see them.
        visible: bool, broadcastable to [B, Hk, G, C, L]. A row that sees nothing gives zeros.

    Returns:
        [B, C, Hk * G, Dv] float32.
    """
    batch, num_kv_heads, group, num_queries, _ = queries.shape
    scaled = queries.float().flatten(2, 3) * layer.scale  # [B, Hk, G * C, D]
    scores = torch.matmul(scaled, keys.transpose(-1, -2)).unflatten(2, (group, num_queries))
    if layer.softcap is not None:
        scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    # The lowest finite number, not -inf: exp gives 0 for it all the same, and a row of nothing else gives no NaN.
    scores = scores.masked_fill_(~visible, _MASKED)
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, num_kv_heads, group, 1, 1).expand(batch, -1, -1, num_queries, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    attended = torch.matmul(weights.flatten(2, 3), values).unflatten(2, (group, num_queries))
    return attended.flatten(1, 2).transpose(1, 2)


def _as_float32(cached: torch.Tensor) -> torch.Tensor:
    # Dense as well, where a copy is made anyway: matmul would copy once more.
    return cached.to(torch.float32, memory_format=torch.contiguous_format)


def _group_heads(q: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
    """[C, H, D] to [Hk, G, C, D]."""
    return q.unflatten(1, (layer.num_kv_heads, -1)).movedim(0, 2)


def _causal(
    query_pos: int, num_queries: int, key_pos: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[num_queries, num_keys]: which keys each query may see, positions counted from the given first ones."""
    queries = torch.arange(query_pos, query_pos + num_queries, device=device)[:, None]
    keys = torch.arange(key_pos, key_pos + num_keys, device=device)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible
