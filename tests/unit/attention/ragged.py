"""Random ragged batches over a paged cache, and attention spelt out in float64 to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from breakgraph.attention import AttentionBackend, AttentionStep, KVCacheBuffers, LayerAttention, RequestTensors

BLOCK_SIZE = 4
NUM_BLOCKS = 128

PLAIN = LayerAttention(layer_id=0, num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.3)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
LAYERS = {
    "plain": PLAIN,
    "one head each": replace(PLAIN, num_kv_heads=4),
    "one key head": replace(PLAIN, num_kv_heads=1),
    "window": replace(PLAIN, window=5),
    "window of one": replace(PLAIN, window=1),
    "softcap": replace(PLAIN, softcap=2.0),
    "sinks": replace(PLAIN, sinks=SINKS),
    "narrow values": replace(PLAIN, v_head_dim=12),
    "wide values": replace(PLAIN, v_head_dim=24),
    "all at once": replace(PLAIN, window=7, softcap=3.0, sinks=SINKS, v_head_dim=12),
}

MISTAKES: list[tuple[LayerAttention, Callable[[Any], LayerAttention]]] = [
    (LAYERS["window"], lambda right: replace(right, window=right.window + 1)),
    (LAYERS["window"], lambda right: replace(right, window=right.window - 1)),
    (LAYERS["window"], lambda right: replace(right, window=None)),
    (LAYERS["sinks"], lambda right: replace(right, sinks=None)),
    (LAYERS["sinks"], lambda right: replace(right, sinks=right.sinks.flip(0))),
    (LAYERS["softcap"], lambda right: replace(right, softcap=None)),
    (PLAIN, lambda right: replace(right, scale=right.scale * 1.01)),
]
"""A layer, and what an implementation that gets it wrong would compute instead."""


@dataclass
class RaggedBatch:
    """One step's q, k and v, its metadata, and the whole history of every request in float64."""

    layer: LayerAttention
    step: AttentionStep
    kv: KVCacheBuffers
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def live(self) -> int:
        return self.step.num_tokens

    def run(self, attention: AttentionBackend, layer: LayerAttention | None = None) -> torch.Tensor:
        """All rows of the output, which starts as NaN. `layer` is what the implementation is told instead."""
        layer = layer or self.layer
        attention.bind(self.kv)
        out = torch.full((*self.q.shape[:2], layer.v_head_dim), torch.nan, dtype=self.q.dtype, device=self.q.device)
        attention.forward(self.q, self.k, self.v, layer, attention.plan(self.step), out)
        return out

    def expected(self) -> torch.Tensor:
        """Live rows, float64."""
        rows = zip(self.q[: self.live].double().split(list(self._q_lens)), self.histories, strict=True)
        return torch.cat([reference(q, k, v, self.layer) for q, (k, v) in rows])

    @property
    def _q_lens(self) -> Sequence[int]:
        return self.step.q_lens or [1] * self.step.num_tokens


def ragged_batch(
    layer: LayerAttention,
    q_lens: Sequence[int],
    cached_lens: Sequence[int],
    *,
    padding: int = 0,
    phase: str = "prefill",
    max_blocks: int = 16,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> RaggedBatch:
    generator = torch.Generator().manual_seed(seed)
    kv = KVCacheBuffers.allocate([layer], NUM_BLOCKS, block_size, dtype, device)
    # Blocks that nobody fills hold NaN: whoever reads them has lost.
    for buffer in (kv.key[layer.layer_id], kv.value[layer.layer_id]):
        buffer[1:].fill_(torch.nan)
    free = torch.randperm(NUM_BLOCKS - 1, generator=generator).add(1).tolist()

    def random(rows: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(rows, heads, size, generator=generator).to(device, dtype)

    tables, slots, histories, new_k, new_v = [], [], [], [], []
    for num_new, num_cached in zip(q_lens, cached_lens, strict=True):
        total = num_new + num_cached
        k, v = random(total, layer.num_kv_heads, layer.head_dim), random(total, layer.num_kv_heads, layer.v_head_dim)
        blocks = [free.pop() for _ in range(-(-total // block_size))]
        own = [blocks[i // block_size] * block_size + i % block_size for i in range(total)]
        if num_cached:
            kv.write(layer.layer_id, torch.tensor(own[:num_cached], device=device), k[:num_cached], v[:num_cached])
        tables.append(blocks + [0] * (max_blocks - len(blocks)))
        slots += own[num_cached:]
        new_k.append(k[num_cached:])
        new_v.append(v[num_cached:])
        histories.append((k.double(), v.double()))
    live = sum(q_lens)
    decode = phase == "decode"
    seq_lens = [new + cached for new, cached in zip(q_lens, cached_lens, strict=True)]
    pad_rows = padding if decode else 0
    host_tables = () if decode else tables
    requests = RequestTensors(
        cu_seqlens_q=torch.tensor([0, *q_lens], device=device).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens + [1] * pad_rows, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables + [[0] * max_blocks] * pad_rows, dtype=torch.int32, device=device),
    )
    step = AttentionStep(
        phase=phase,
        num_tokens=live,
        padded_num_tokens=live + padding,
        q_lens=() if decode else tuple(q_lens),
        seq_lens=() if decode else tuple(seq_lens),
        slot_mapping_gpu=torch.tensor(slots + [0] * padding, dtype=torch.int64, device=device),
        block_tables=host_tables,
        requests=lambda: requests,
    )
    pad_k = random(padding, layer.num_kv_heads, layer.head_dim)
    pad_v = random(padding, layer.num_kv_heads, layer.v_head_dim)
    q = random(live + padding, layer.num_heads, layer.head_dim)
    return RaggedBatch(layer, step, kv, q, torch.cat([*new_k, pad_k]), torch.cat([*new_v, pad_v]), histories)


def with_changes(step: AttentionStep, **changes: Any) -> AttentionStep:
    """`replace`, which takes request tensors too, by the names that a step has for them."""
    fields = {f"{name}_gpu": name for name in ("cu_seqlens_q", "seq_lens", "block_tables")}
    tensors = {fields[name]: changes.pop(name) for name in list(changes) if name in fields}
    requests = replace(step.requests(), **tensors)
    return replace(step, requests=lambda: requests, **changes)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
    """One request, token by token and head by head: q [new, H, D], k and v [total, Hk, D], the new tokens last."""
    num_cached = k.shape[0] - q.shape[0]
    out = q.new_zeros(q.shape[0], layer.num_heads, layer.v_head_dim)
    for row in range(q.shape[0]):
        position = num_cached + row
        first = 0 if layer.window is None else max(0, position - layer.window + 1)
        for head in range(layer.num_heads):
            shared = head * layer.num_kv_heads // layer.num_heads
            scores = k[first : position + 1, shared] @ q[row, head] * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            weights = scores.exp()
            total = weights.sum()
            if layer.sinks is not None:
                total = total + math.exp(layer.sinks[head].item())
            out[row, head] = weights @ v[first : position + 1, shared] / total
    return out
