"""Attention steps on a GPU over a paged cache, and what they should give in float64: shared by check and benchmark."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from breakgraph.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionStep,
    KVCacheBuffers,
    LayerAttention,
    RequestTensors,
)

BLOCK = 16
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LAYER = LayerAttention(0, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, scale=128**-0.5)
MAX_SCORES = 1 << 27
"""Scores of the reference at a time, 8 bytes each."""


@dataclass
class Case:
    """One step over a cache of its own."""

    layer: LayerAttention
    step: AttentionStep
    kv: KVCacheBuffers
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def plan(self, attention: AttentionBackend) -> AttentionMetadata:
        attention.bind(self.kv)
        return attention.plan(self.step)

    def empty_out(self) -> torch.Tensor:
        """[T, H, Dv], all NaN."""
        return torch.full((*self.q.shape[:2], self.layer.v_head_dim), torch.nan, dtype=DTYPE, device=DEVICE)

    def run(self, attention: AttentionBackend) -> torch.Tensor:
        out = self.empty_out()
        attention.forward(self.q, self.k, self.v, self.layer, self.plan(attention), out)
        return out


def make_case(
    layer: LayerAttention,
    q_lens: Sequence[int],
    cached_lens: Sequence[int],
    *,
    phase: str = "prefill",
    padding: int = 0,
    seed: int = 0,
    holes: bool = False,
) -> Case:
    """Random history in scattered blocks. With `holes` every slot that no request owns is NaN.

    `padding` rows stand behind the live ones; in the decode phase each reads one token of the reserved block.
    """
    rng, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    seq_lens = [new + cached for new, cached in zip(q_lens, cached_lens, strict=True)]
    counts = [-(-total // BLOCK) for total in seq_lens]
    free = list(range(1, sum(counts) + 8))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    kv = _filled_cache(layer, sum(counts) + 8, tables, seq_lens, generator, holes)
    new_slots = [
        table[position // BLOCK] * BLOCK + position % BLOCK
        for table, cached, total in zip(tables, cached_lens, seq_lens, strict=True)
        for position in range(cached, total)
    ]
    live, pad_reqs = sum(q_lens), padding if phase == "decode" else 0
    width = max(counts)
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    requests = RequestTensors(
        cu_seqlens_q=_ints(starts),
        seq_lens=_ints([*seq_lens, *[1] * pad_reqs]),
        block_tables=_ints([row + [0] * (width - len(row)) for row in tables] + [[0] * width] * pad_reqs),
    )
    step = AttentionStep(
        phase=phase, num_tokens=live, padded_num_tokens=live + padding,
        q_lens=tuple(q_lens), seq_lens=tuple(seq_lens),
        slot_mapping_gpu=_ints(new_slots + [0] * padding, torch.int64),
        requests=lambda: requests,
    )  # fmt: skip
    shapes = ((layer.num_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim),
              (layer.num_kv_heads, layer.v_head_dim))  # fmt: skip
    q, k, v = (
        torch.randn(live + padding, heads, size, generator=generator, device=DEVICE, dtype=DTYPE)
        for heads, size in shapes
    )
    return Case(layer, step, kv, q, k, v)


def _ints(values: Sequence[object], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _filled_cache(
    layer: LayerAttention,
    num_blocks: int,
    tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    generator: torch.Generator,
    holes: bool,
) -> KVCacheBuffers:
    kv = KVCacheBuffers.allocate([layer], num_blocks, BLOCK, DTYPE, DEVICE)
    for buffer in (kv.key[layer.layer_id], kv.value[layer.layer_id]):
        buffer.normal_(generator=generator)
        if holes:
            buffer[0].zero_()
            used = torch.zeros(num_blocks, dtype=torch.bool)
            for table, seq_len in zip(tables, seq_lens, strict=True):
                used[list(table)] = True
                buffer[table[-1], (seq_len - 1) % BLOCK + 1 :] = torch.nan
            used[0] = True
            buffer[(~used).to(DEVICE)] = torch.nan
    return kv


def reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Live rows in float64, from what the cache holds now: the exact output, and the mean of |values| in its place.

    Both [live, H, Dv].
    """
    layer, parts, start = case.layer, [], 0
    for request, (num_new, total) in enumerate(zip(case.step.q_lens, case.step.seq_lens, strict=True)):
        blocks = case.step.block_tables_gpu[request, : -(-total // BLOCK)]
        keys, values = (t[:total].double().movedim(0, 1)[:, None] for t in case.kv.read_blocks(layer.layer_id, blocks))
        chunk = max(1, MAX_SCORES // (layer.num_heads * total))
        for row in range(0, num_new, chunk):
            q = case.q[start + row : start + min(row + chunk, num_new)].double()
            weights = _weights(layer, q, keys, total - num_new + row)
            parts.append([(weights @ some).movedim(2, 0).flatten(1, 2) for some in (values, values.abs())])
        start += num_new
    exact, size = (torch.cat(part) for part in zip(*parts, strict=True))
    return exact, size


def _weights(layer: LayerAttention, q: torch.Tensor, keys: torch.Tensor, first_pos: int) -> torch.Tensor:
    """[Hk, G, n, L] of queries [n, H, D] from position `first_pos` on and keys [Hk, 1, L, D], float64."""
    group = layer.num_heads // layer.num_kv_heads
    scores = q.unflatten(1, (-1, group)).movedim(0, 2) @ keys.transpose(-1, -2) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    columns = torch.arange(keys.shape[2], device=DEVICE)
    positions = torch.arange(first_pos, first_pos + len(q), device=DEVICE)[:, None]
    visible = columns <= positions
    if layer.window is not None:
        visible &= columns > positions - layer.window
    scores.masked_fill_(~visible, -torch.inf)
    if layer.sinks is None:
        return scores.softmax(-1)
    sinks = layer.sinks.double().view(-1, group, 1, 1).expand(-1, -1, len(q), 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def of_size(layer: LayerAttention, num_heads: int, num_kv_heads: int, head_dim: int) -> LayerAttention:
    """The layer with other heads, and the usual scale for their size."""
    return replace(
        layer, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=head_dim,
        scale=head_dim**-0.5,
    )  # fmt: skip


def with_sinks(layer: LayerAttention, device: torch.device = DEVICE) -> LayerAttention:
    return replace(layer, sinks=torch.linspace(-2, 3, layer.num_heads, device=device, dtype=DTYPE))
