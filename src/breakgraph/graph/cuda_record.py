"""What a CUDA graph does not keep alive by itself, seen while it is captured: every outside tensor it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.graph.effects import allocates_only, tensors_in
from breakgraph.graph.refusals import cuda_transfer_fault, op_fault, refuse


class CudaRecorder(TorchDispatchMode):
    """Lets every operator through; notes what it reads from outside, what it launches, and on which stream.

    Attributes:
        enabled: Set while a segment is open; otherwise everything passes.
        pins: Storages the open segment reads that were not produced in this capture, by identity.
        num_ops: Operators of the open segment that must have put a node into the graph.
        side_streams: Streams other than the capture stream that were launched on, in any segment.
    """

    def __init__(self, stream: torch.cuda.Stream, check_storage: Callable[[torch.UntypedStorage], None]) -> None:
        super().__init__()
        self.enabled = False
        self.pins: dict[int, torch.UntypedStorage] = {}
        self.num_ops = 0
        self.side_streams: dict[int, torch.cuda.Stream] = {}
        self._stream = stream
        self._check_storage = check_storage
        self._produced: set[int] = set()

    def start(self) -> None:
        """Open a segment."""
        self.enabled, self.pins, self.num_ops = True, {}, 0

    def note_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Pin what is read and was not made in this capture."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._produced and storage._cdata not in self.pins:
                self._check_storage(storage)
                self.pins[storage._cdata] = storage

    def note_made(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were made in this capture."""
        self._produced.update(t.untyped_storage().data_ptr() for t in tensors if t.is_cuda and t.numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        with self:
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        given = [*tensors_in(list(args)), *tensors_in(list(kwargs.values()))]
        fault = op_fault(func, args) or cuda_transfer_fault(func, args, kwargs, given)
        if fault is not None:
            refuse(fault)
        out = func(*args, **kwargs)
        self.note_reads(given)
        storages = {t.untyped_storage().data_ptr() for t in given}
        made = [t for t in tensors_in(out) if t.untyped_storage().data_ptr() not in storages]
        self.note_made(made)
        fresh = any(t.is_cuda and t.numel() for t in made)
        writes = func._schema.is_mutable and any(t.is_cuda and t.numel() for t in given)
        if not func.is_view and not allocates_only(func) and (fresh or writes):
            self.num_ops += 1
            if (current := torch.cuda.current_stream(self._stream.device)) != self._stream:
                self.side_streams[current.cuda_stream] = current
        return out
