"""The attention call that models make: an eager break in a breakable capture, a plain call otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from breakgraph.attention.base import AttentionBackend, BoundAttention
from breakgraph.attention.step import current_step
from breakgraph.graph.eager_break import BoundBreak
from breakgraph.graph.tracing import TracePlace, Untraced


def _bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int, stored: bool = False
) -> Callable[[], None]:
    """`attend` for one captured call. Which implementation attends is the step's matter."""
    calls: dict[AttentionBackend, BoundAttention] = {}

    def run() -> None:
        metadata = current_step()
        backend = metadata.backend
        call = calls.get(backend)
        if call is None:
            call = calls[backend] = backend.bound(q, k, v, backend.layers[layer_id], out, stored)
        call(metadata)

    return run


# No valid_rows: the implementation defines the padding rows itself, so that padded eager steps get them too.
@partial(BoundBreak, bind=_bind, mutates=("out",))
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int, stored: bool = False
) -> None:
    """Attention of one layer for the step in progress; fills `out` [T, num_heads, v_head_dim] in place.

    Batch lengths, block tables and the cache come from `current_step`, never from arguments: those would be the
    capture's at every replay.

    Args:
        q: [T, num_heads, head_dim].
        k: [T, num_kv_heads, head_dim].
        v: [T, num_kv_heads, v_head_dim].
        stored: What :func:`store` returned for `k` and `v`, if it was called.

    Raises:
        RuntimeError: outside `use_step`.
    """
    metadata = current_step()
    backend = metadata.backend
    backend.forward(q, k, v, backend.layers[layer_id], metadata, out, stored)


def store(k: torch.Tensor, v: torch.Tensor, layer_id: int) -> bool:
    """Writes one layer's new keys and values into the cache ahead of `attend`, if the implementation can do it in a
    graph; returns whether it did.

    Args:
        k: [T, num_kv_heads, head_dim].
        v: [T, num_kv_heads, v_head_dim].

    Raises:
        RuntimeError: outside `use_step`.
    """
    return _store(k, v, layer_id)


def _store(k: torch.Tensor, v: torch.Tensor, layer_id: int) -> bool:
    metadata = current_step()
    return metadata.backend.store(k, v, metadata.backend.layers[layer_id], metadata)


TracePlace(partial(setattr, sys.modules[__name__], "_store"), _store, Untraced(_store))
