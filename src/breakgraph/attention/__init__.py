"""Attention over the paged KV cache: the interface, its implementations, and the marked call that models make.

`attend` is the eager break that a model calls; `make_attention` picks the implementation behind it.
"""

from breakgraph.attention.attend import attend, store
from breakgraph.attention.base import AttentionBackend, AttentionMetadata, GraphSupport, LayerAttention
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.registry import ATTENTION_NAMES, make_attention
from breakgraph.attention.step import AttentionStep, RequestTensors, current_step, live_token_count, use_step

__all__ = [
    "ATTENTION_NAMES",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionStep",
    "GraphSupport",
    "KVCacheBuffers",
    "LayerAttention",
    "RequestTensors",
    "attend",
    "current_step",
    "live_token_count",
    "make_attention",
    "store",
    "use_step",
]
