"""Which attention implementation serves a model: by name, or `auto` by device, dtype, phase and layers."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

import torch

from breakgraph.attention.base import DECODE, AttentionBackend, LayerAttention
from breakgraph.attention.phase import PhaseAttention
from breakgraph.attention.sized import SizedAttention
from breakgraph.errors import ConfigError, UnknownNameError

logger = logging.getLogger(__name__)

_WHERE = {
    "flash": ("breakgraph.attention.flash", "FlashAttention"),
    "flashinfer": ("breakgraph.attention.flashinfer", "FlashInferAttention"),
    "sdpa": ("breakgraph.attention.sdpa", "SdpaAttention"),
    "triton": ("breakgraph.attention.triton", "TritonAttention"),
}
_EXTRAS = {"flashinfer": "breakgraph[flashinfer]"}
"""What to install for an implementation whose package is optional."""
ATTENTION_NAMES = ("auto", *sorted(_WHERE))

PREFILL = "prefill"
# What auto tries on CUDA in half precision, in the order of speed on an H200 with heads of 128; sdpa takes the rest.
# Triton plans nothing on the host, which a decode step or a short prompt feels; it beats torch's FlashAttention.
_PREFERRED = {PREFILL: ("flashinfer", "triton", "flash"), DECODE: ("triton", "flashinfer")}
_HALF = (torch.float16, torch.bfloat16)


def make_attention(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    layers: Iterable[LayerAttention],
    *,
    block_size: int = 16,
    in_graph: Collection[str] = (),
) -> AttentionBackend:
    """The implementation called `name`, for these layers on this device.

    `auto` chooses one for the decode phase and one or two for all others, by how much work a step is, and logs each
    choice with its reason.

    Args:
        block_size: tokens in a block of the cache that it will be bound to.
        in_graph: phases whose attention is recorded into graphs, where `auto` takes only what declares support.

    Raises:
        UnknownNameError: for a name that is not in ATTENTION_NAMES.
        ConfigError: when a named implementation cannot serve a layer or the block size, or its package is missing.
    """
    if name not in ATTENTION_NAMES:
        raise UnknownNameError("attention", name, ATTENTION_NAMES)
    demand = _Demand(tuple(layers), torch.device(device), dtype, block_size, frozenset(in_graph))
    if name == "auto":
        return _choose(demand)
    try:
        implementation = _implementation(name)
        refused = demand.refusal(implementation)
        if refused is not None:
            raise ConfigError(f"attention={name!r} cannot serve {refused}; use attention='auto' or 'sdpa'")
        return implementation(demand.layers)
    except ImportError as error:
        way_out = f"install it with pip install '{_EXTRAS[name]}', or " if name in _EXTRAS else ""
        raise ConfigError(
            f"attention={name!r} needs a package that does not import here ({error}); {way_out}use attention='auto' or "
            "'sdpa'"
        ) from error


@dataclass(frozen=True)
class _Demand:
    """What an implementation has to serve."""

    layers: tuple[LayerAttention, ...]
    device: torch.device
    dtype: torch.dtype
    block_size: int
    in_graph: frozenset[str]

    def refusal(self, cls: type[AttentionBackend]) -> str | None:
        for layer in self.layers:
            reason = cls.refusal(layer, self.device, self.dtype)
            if reason is not None:
                return f"layer {layer.layer_id}: {reason}"
        reason = cls.block_size_refusal(self.block_size)
        return None if reason is None else f"the KV cache: {reason}"


def _choose(demand: _Demand) -> AttentionBackend:
    made: dict[str, AttentionBackend] = {}
    chosen: dict[str, AttentionBackend] = {}
    for phase, names in _PREFERRED.items():
        passed_over: list[str] = []
        if demand.device.type != "cuda" or demand.dtype not in _HALF:
            passed_over.append(f"{demand.device.type}, {str(demand.dtype).removeprefix('torch.')}")
            names = ()
        for name in (*names, "sdpa"):
            reason = _make_for(phase, name, demand, made)
            if reason is None:
                chosen[phase] = made[name]
                break
            passed_over.append(f"{name} {reason}")
        logger.info("attention=%s for %s: %s", chosen[phase].name, phase, "; ".join(passed_over) or "first choice")
    if chosen[PREFILL].name == "flashinfer" and _make_for(PREFILL, "triton", demand, made) is None:
        from breakgraph.attention.triton import TritonAttention

        # FlashInfer takes the requests that are long.
        chosen[PREFILL] = SizedAttention(TritonAttention(demand.layers, short=True), chosen[PREFILL])
        logger.info("attention=triton for prefill of little work: it plans nothing on the host")
    if chosen[PREFILL] is chosen[DECODE]:
        return chosen[PREFILL]
    return PhaseAttention(chosen[PREFILL], {DECODE: chosen[DECODE]})


def _make_for(phase: str, name: str, demand: _Demand, made: dict[str, AttentionBackend]) -> str | None:
    """Puts the implementation into `made` and gives None where it can serve the phase, else why it cannot."""
    if name in _EXTRAS and importlib.util.find_spec(name) is None:
        return "is not installed"
    try:
        implementation = _implementation(name)
        refused = demand.refusal(implementation)
        if refused is not None:
            return f"cannot serve {refused}"
        if name not in made:
            made[name] = implementation(demand.layers)
    except ImportError as error:
        return f"does not import ({error})"
    needed = ("decode", "varlen") if phase == DECODE else ("varlen",)
    if phase in demand.in_graph and made[name].graph_support(phase) not in needed:
        return "cannot be in a graph there"
    return None


def _implementation(name: str) -> type[AttentionBackend]:
    module, attribute = _WHERE[name]
    return cast("type[AttentionBackend]", getattr(importlib.import_module(module), attribute))
