"""Who still holds pool memory after a capture: found through the garbage collector, named for a person."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from breakgraph.graph.device import Block, Pool
from breakgraph.graph.heap import alive
from breakgraph.graph.tree import describe


def find_holders(pool: Pool, blocks: Sequence[Block]) -> list[str]:
    """One line for each live tensor in ``blocks`` of ``pool``: what it is, and what refers to it."""
    lines = []
    tensors = alive(torch.Tensor)
    for candidate in tensors:
        if issubclass(type(candidate), FakeTensor):
            continue
        try:
            storage = candidate.untyped_storage()
            address = storage.data_ptr()
        except RuntimeError:  # a wrapper subclass or a meta tensor has no storage address
            continue
        in_blocks = any(block.address <= address < block.address + block.nbytes for block in blocks)
        if in_blocks and not pool.is_view(storage):
            referrers = [referrer for referrer in gc.get_referrers(candidate) if referrer is not tensors]
            holders = [name for referrer in referrers if (name := _name(referrer, candidate))]
            lines.append(f"{describe(candidate)}, held by {' and '.join(sorted(set(holders))) or 'unknown'}")
    return lines


def _name(referrer: object, tensor: torch.Tensor) -> str | None:
    if isinstance(referrer, types.FrameType) or referrer is globals():
        return None
    if isinstance(referrer, functools._lru_cache_wrapper):
        return f"the cache of {referrer.__qualname__}()"
    if isinstance(referrer, dict):
        keys = [str(key) for key, value in referrer.items() if value is tensor]
        for owner in gc.get_referrers(referrer):
            if getattr(owner, "__dict__", None) is referrer and keys:
                return f"{type(owner).__name__}.{keys[0]}"
            if isinstance(owner, dict) and owner.get("_buffers") is referrer and keys:
                module = next((m for m in gc.get_referrers(owner) if getattr(m, "__dict__", None) is owner), None)
                return f"buffer {type(module).__name__}.{keys[0]}"
        return f"a dict under {keys[0]!r}" if keys else None
    if isinstance(referrer, list | tuple | set):
        return f"a {type(referrer).__name__} of {len(referrer)}"
    if isinstance(referrer, types.CellType):
        return "a closure"
    return None
