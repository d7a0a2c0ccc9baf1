"""What an attention implementation has to offer, and the two records that it works on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.step import AttentionStep

GraphSupport = Literal["none", "decode", "varlen"]
"""What a full graph may hold: nothing; one query per row; any number of queries per request."""

DECODE = "decode"


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The constants of one layer's attention."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    """A query sees itself and the `window - 1` tokens before it; None: all of them."""
    softcap: float | None = None
    """Scores become tanh(score / softcap) * softcap."""
    sinks: torch.Tensor | None = None
    """[num_heads]: a logit per head that takes probability and has no value."""


@dataclass(frozen=True)
class AttentionMetadata:
    """One step as its implementation wants it. Owned by the step; no plan may keep it."""

    step: AttentionStep
    backend: AttentionBackend


BoundAttention: TypeAlias = Callable[[AttentionMetadata], None]
""":meth:`AttentionBackend.forward` on tensors that stay where they are; takes a step's metadata."""


class AttentionBackend(ABC):
    """Attention over the paged cache for one model's layers.

    Borrows: the KV cache that `bind` names. Stateless otherwise: what differs from step to step is in the metadata.
    """

    name: str

    def __init__(self, layers: Iterable[LayerAttention]) -> None:
        self.layers: Mapping[int, LayerAttention] = {layer.layer_id: layer for layer in layers}
        self._kv: KVCacheBuffers | None = None

    def bind(self, kv: KVCacheBuffers) -> None:
        """Use this cache from now on. A plan captured with another cache keeps reading the old one."""
        self._kv = kv

    @property
    def kv(self) -> KVCacheBuffers:
        if self._kv is None:
            raise RuntimeError(f"attention {self.name!r} has no KV cache yet; call bind(kv) before the first step")
        return self._kv

    @classmethod
    @abstractmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this layer cannot be served on that device in that dtype, or None when it can."""

    @classmethod
    def block_size_refusal(cls, block_size: int) -> str | None:
        """Why a cache with blocks of that many tokens cannot be read, or None when it can."""
        return None

    def for_phase(self, phase: str) -> AttentionBackend:
        """The implementation that serves this phase's steps."""
        return self

    def for_step(self, step: AttentionStep) -> AttentionBackend:
        """The implementation that serves this step."""
        return self

    @abstractmethod
    def graph_support(self, phase: str) -> GraphSupport:
        """What a full graph of this phase may hold: with "none", attention has to stay in eager breaks."""

    @abstractmethod
    def plan(self, step: AttentionStep) -> AttentionMetadata:
        """The step's metadata, made once and read by every layer.

        For a phase that full graphs may hold, it must refer to the step's own device tensors and allocate none: a
        replay runs no Python, so whatever else it read would be the capture's.
        """

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention, metadata: AttentionMetadata) -> bool:
        """Writes the new keys and values into the cache, ahead of `forward` and outside of the break that it is in.

        A replay then writes them in its graph, and the host launches nothing for it. Possible where the step's rows lie
        in static tensors, in a bucket.

        Returns:
            False where nothing was written: `forward` has to.
        """
        return False

    @abstractmethod
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
        """Writes the new keys and values into the cache, unless `stored`, then every row of `out`.

        Args:
            q: [T, num_heads, head_dim], T = the step's padded_num_tokens.
            k: [T, num_kv_heads, head_dim].
            v: [T, num_kv_heads, v_head_dim].
            out: [T, num_heads, v_head_dim]; padding rows end up zero, or finite where a full graph computes them.
        """

    def bound(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerAttention,
        out: torch.Tensor,
        stored: bool = False,
    ) -> BoundAttention:
        """`forward` for an eager break, which every replay of a plan calls with the same tensors.

        What they alone decide can be worked out here, once. It has to follow `bind`, as `forward` does.
        """

        def run(metadata: AttentionMetadata) -> None:
            self.forward(q, k, v, layer, metadata, out, stored)

        return run
