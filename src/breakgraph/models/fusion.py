"""Fewer kernels: the repeated blocks of a model, compiled.

Each kind of block is compiled once for all layers of its kind and any number of tokens, before anything is captured:
Dynamo's guards run while a graph is captured and never at a replay. Attention stays what it is, between the compiled
parts, and so do experts that are no operator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from breakgraph.attention import live_token_count
from breakgraph.errors import ConfigError
from breakgraph.graph.compiled import hide_breaks, run_compiled
from breakgraph.models.experts import has_traced_experts, hide_experts
from breakgraph.models.hf import HFModel
from breakgraph.models.hook import hide_attention
from breakgraph.models.live_rows import give_live_count
from breakgraph.models.merging import merge_linears

logger = logging.getLogger(__name__)

_MAX_VARIANTS = 64
"""Of one piece of code: block kinds, times one for a single token and one for more, times one with padding and one
without where there are experts."""


class _CompiledBlock:
    """In the place of the `forward` of one block."""

    def __init__(self, block: torch.nn.Module, backend: str, options: dict[str, Any] | None) -> None:
        self._block = block
        self._compiled = torch.compile(block.forward, backend=backend, dynamic=True, options=options)
        self._has_experts = has_traced_experts(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        count = live_token_count(hidden_states.shape[-2]) if self._has_experts else None
        with _as_compiled(), give_live_count(count):
            return run_compiled(self._compiled, partial(self._reads, count), args, kwargs)

    def _reads(self, count: torch.Tensor | None) -> Iterator[torch.Tensor]:
        yield from self._block.parameters()
        yield from self._block.buffers()
        if count is not None:
            yield count


@contextmanager
def _as_compiled() -> Iterator[None]:
    """What Dynamo's guards ask for is the same in warm-ups, captures and eager steps; a block that is compiled too
    often is an error, and not run as it was."""
    import torch._dynamo

    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    limits = {
        "recompile_limit": _MAX_VARIANTS,
        "accumulated_recompile_limit": 16 * _MAX_VARIANTS,
        "fail_on_recompile_limit_hit": True,
        "specialize_float": True,  # else an epsilon is an argument, in float64
    }
    try:
        with torch._dynamo.config.patch(limits):
            yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def fuse(model: HFModel) -> None:
    """Compile the blocks of ``model`` with Inductor when they first run; on a CPU trace them only, to the same effect.

    What Inductor has compiled it keeps on disk, where ``TORCHINDUCTOR_CACHE_DIR`` says, and later processes find it.

    Raises:
        ConfigError: the model has no list of layers.
    """
    blocks = _blocks(model)
    merged = sum(merge_linears(block) for block in blocks)
    for hide in (hide_breaks, hide_attention, hide_experts):
        hide()
    backend = "inductor" if model.device.type == "cuda" else "eager"
    options = None
    if backend == "inductor":
        from breakgraph.models.few_rows import choose_by_rows

        options = _inductor_options()
        choose_by_rows(model.module.get_output_embeddings())  # it lies behind the blocks, where no rewrite finds it
    for block in blocks:
        block.forward = _CompiledBlock(block, backend, options)
    logger.info(
        "fusion=inductor: %d blocks of %s, %d groups of linear layers merged%s",
        len(blocks), type(blocks[0]).__name__, merged,
        "" if backend == "inductor" else ", traced and not compiled on the emulated device",
    )  # fmt: skip


def _inductor_options() -> dict[str, Any]:
    from breakgraph.models.rewrites import BlockRewrites

    return {"post_grad_custom_pre_pass": BlockRewrites()}


def _blocks(model: HFModel) -> list[torch.nn.Module]:
    for module in model.module.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.num_layers:
            return list(module)
    raise ConfigError(
        f"fusion='inductor' compiles a list of {model.num_layers} layers, and {model.name} "
        f"({type(model.module).__name__}) has none; use fusion='none'"
    )
