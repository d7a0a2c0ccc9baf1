"""An attention that computes nothing itself: it chooses another one for each step."""

from __future__ import annotations

from abc import abstractmethod

import torch

from breakgraph.attention.base import AttentionBackend, AttentionMetadata, LayerAttention
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.step import AttentionStep


class DispatchingAttention(AttentionBackend):
    """Each step goes to one of `choices`, which may dispatch again; a subclass says to which.

    A step's metadata names the one that planned it, so `attend` finds that one by itself.
    """

    def __init__(self, *choices: AttentionBackend) -> None:
        super().__init__(choices[0].layers.values())
        self._choices = choices

    def bind(self, kv: KVCacheBuffers) -> None:
        super().bind(kv)
        for choice in self._choices:
            choice.bind(kv)

    @classmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        """None, as nothing is computed here: whoever made the choices has asked each of them."""
        return None

    @abstractmethod
    def _choose(self, step: AttentionStep) -> AttentionBackend:
        """Which of the choices the step goes to."""

    def for_step(self, step: AttentionStep) -> AttentionBackend:
        return self._choose(step).for_step(step)

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        # Not for_step(step).plan(step): a choice that dispatches again may have more to do at a plan.
        return self._choose(step).plan(step)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention, metadata: AttentionMetadata) -> bool:
        return metadata.backend.store(k, v, layer, metadata)

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
        metadata.backend.forward(q, k, v, layer, metadata, out, stored)
