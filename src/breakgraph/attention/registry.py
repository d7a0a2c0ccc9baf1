"""Which attention implementation serves a model: by name, or `auto` by device, dtype and what the layers need."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import ClassVar, cast

import torch

from breakgraph.attention.base import DECODE, AttentionBackend, AttentionMetadata, GraphSupport, LayerAttention
from breakgraph.attention.flash import FlashAttention
from breakgraph.attention.kv_buffers import KVCacheBuffers
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.attention.step import AttentionStep
from breakgraph.errors import ConfigError, UnknownNameError

logger = logging.getLogger(__name__)

_WHERE = {
    "flash": ("breakgraph.attention.flash", "FlashAttention"),
    "sdpa": ("breakgraph.attention.sdpa", "SdpaAttention"),
    "triton": ("breakgraph.attention.triton", "TritonAttention"),
}
ATTENTION_NAMES = ("auto", *sorted(_WHERE))


def make_attention(
    name: str, device: torch.device | str, dtype: torch.dtype, layers: Iterable[LayerAttention]
) -> AttentionBackend:
    """The implementation called `name`, for these layers on this device.

    `auto` takes flash for steps with a prompt in them where every layer allows it, and sdpa for all others: a full
    graph of the decode phase can hold sdpa only. The choice is logged with its reason.

    Raises:
        UnknownNameError: for a name that is not in ATTENTION_NAMES.
        ConfigError: when a named implementation cannot serve one of the layers, or its package is missing.
    """
    if name not in ATTENTION_NAMES:
        raise UnknownNameError("attention", name, ATTENTION_NAMES)
    layers, device = list(layers), torch.device(device)
    if name != "auto":
        implementation = _implementation(name)
        refused = _first_refusal(implementation, layers, device, dtype)
        if refused is not None:
            raise ConfigError(f"attention={name!r} cannot serve {refused}; use attention='auto' or 'sdpa'")
        return implementation(layers)
    sdpa = SdpaAttention(layers)
    refused = _first_refusal(FlashAttention, layers, device, dtype)
    if refused is not None:
        logger.info("attention=sdpa for all phases: flash cannot serve %s", refused)
        return sdpa
    logger.info("attention=flash where prompts are: CUDA, %s, no layer refuses it; sdpa for decode", dtype)
    return PhaseAttention(FlashAttention(layers), {DECODE: sdpa})


def _implementation(name: str) -> type[AttentionBackend]:
    module, attribute = _WHERE[name]
    try:
        return cast("type[AttentionBackend]", getattr(importlib.import_module(module), attribute))
    except ImportError as error:
        raise ConfigError(
            f"attention={name!r} needs a package that does not import here ({error}); use attention='auto' or 'sdpa'"
        ) from error


def _first_refusal(
    cls: type[AttentionBackend], layers: Iterable[LayerAttention], device: torch.device, dtype: torch.dtype
) -> str | None:
    reasons = ((layer.layer_id, cls.refusal(layer, device, dtype)) for layer in layers)
    return next((f"layer {layer_id}: {reason}" for layer_id, reason in reasons if reason is not None), None)


class PhaseAttention(AttentionBackend):
    """Another implementation for some phases. A step's metadata names the one that planned it, so `attend` finds it."""

    name: ClassVar[str] = "auto"

    def __init__(self, default: AttentionBackend, by_phase: dict[str, AttentionBackend]) -> None:
        super().__init__(default.layers.values())
        self.default = default
        self.by_phase = by_phase

    def bind(self, kv: KVCacheBuffers) -> None:
        super().bind(kv)
        for backend in (self.default, *self.by_phase.values()):
            backend.bind(kv)

    @classmethod
    def refusal(cls, layer: LayerAttention, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def for_phase(self, phase: str) -> AttentionBackend:
        return self.by_phase.get(phase, self.default)

    def graph_support(self, phase: str) -> GraphSupport:
        return self.for_phase(phase).graph_support(phase)

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        return self.for_phase(step.phase).plan(step)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerAttention,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        metadata.backend.forward(q, k, v, layer, metadata, out)
