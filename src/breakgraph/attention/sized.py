"""Short steps by one implementation, long ones by another."""

from __future__ import annotations

from collections import Counter

from breakgraph.attention.base import AttentionBackend, AttentionMetadata, GraphSupport
from breakgraph.attention.dispatching import DispatchingAttention
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.step import AttentionStep

LONG_FLOPS = 3e12
"""Of all layers of a step: from here on a faster kernel is worth a plan on the host. On an H200 FlashInfer's takes nine
tenths of the time of Triton's, about; for so many operations that saves as much as its plan costs."""


class SizedAttention(DispatchingAttention):
    """`short` plans nothing on the host, `long` is faster on much work.

    A graph holds one of them: where the metadata has fixed slots, the bucket decides, by one request that fills it.
    """

    def __init__(self, short: AttentionBackend, long: AttentionBackend) -> None:
        super().__init__(short, long)
        self.name = f"{short.name} or {long.name}"
        self.short, self.long = short, long
        self._flops: Counter[int | None] = Counter()
        """Of a query and a key that it sees, in all layers of a window."""
        for layer in self.layers.values():
            self._flops[layer.window] += 2 * layer.num_heads * (layer.head_dim + layer.v_head_dim)
        self._has_planned_long = False

    def bind(self, kv: KVCacheBuffers) -> None:
        super().bind(kv)
        self._has_planned_long = False

    def _choose(self, step: AttentionStep) -> AttentionBackend:
        if not step.fixed_slots:
            if sum(self._flops.values()) * step.num_tokens * max(step.seq_lens, default=0) < LONG_FLOPS:
                return self.short  # however long each request is
            lens = list(zip(step.q_lens, step.seq_lens, strict=True))
        elif self.long.graph_support(step.phase) == "varlen":
            lens = [(step.padded_num_tokens, step.padded_num_tokens)]
        else:
            return self.short
        flops = sum(each * sum(_num_pairs(*pair, window) for pair in lens) for window, each in self._flops.items())
        return self.long if flops >= LONG_FLOPS else self.short

    def graph_support(self, phase: str) -> GraphSupport:
        return self.short.graph_support(phase)

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        if not (self._has_planned_long or step.fixed_slots):
            # Once ahead of need: what it compiles and allocates on first use belongs to a warm-up.
            self._has_planned_long = True
            self.long.plan(step)
        return super().plan(step)


def _num_pairs(q_len: int, seq_len: int, window: int | None) -> int:
    """Of a query and a key that it sees, about; `q_len` queries at the end of `seq_len` keys."""
    causal = q_len * seq_len - q_len * (q_len - 1) // 2
    return causal if window is None else min(causal, q_len * window)
