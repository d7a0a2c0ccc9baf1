"""A tape's operators in words, for an audit: numbers as they are, tensors by place and layout."""

from __future__ import annotations

from typing import Any

import torch

from breakgraph.graph.cpu_pool import CpuPool
from breakgraph.graph.cpu_record import CompiledEntry, TapeEntry
from breakgraph.graph.device import RecordedCall
from breakgraph.graph.effects import bound_arguments


def describe_entry(
    entry: TapeEntry | CompiledEntry, pool: CpuPool, pinned: set[int], outside: dict[int, int]
) -> RecordedCall:  # fmt: skip
    """One operator of a tape, or one call of compiled code.

    Args:
        pool: Its own pool.
        pinned: Addresses of the storages outside the pool that the segment reads.
        outside: See :meth:`Segment.recorded`.
    """

    def word(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return _tensor(value, pool, pinned, outside)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(word, value))}]"
        return "a generator" if isinstance(value, torch.Generator) else repr(value)

    results = {f"result {i}": word(value) for i, value in enumerate(entry.results) if value is not None}
    if isinstance(entry, CompiledEntry):
        return RecordedCall("compiled code", {f"argument {i}": word(v) for i, v in enumerate(entry.args)} | results)
    arguments = {spec.name: word(value) for spec, value in bound_arguments(entry.func, entry.args, entry.kwargs)}
    return RecordedCall(str(entry.func), arguments | results)


def _tensor(tensor: torch.Tensor, pool: CpuPool, pinned: set[int], outside: dict[int, int]) -> str:
    storage = tensor.untyped_storage().data_ptr()
    layout = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {list(tensor.stride())}"
    place = pool.place_of(tensor.data_ptr())
    if place is None and storage in pinned:
        place = f"outside {outside.setdefault(storage, len(outside))}+{tensor.data_ptr() - storage}"
    return f"{layout} holding {tensor.tolist()!r}" if place is None else f"{layout} at {place}"  # None: baked in
