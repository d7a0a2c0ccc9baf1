"""What a CUDA graph does not keep alive by itself, seen while it is captured: every outside tensor it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.graph.effects import tensors_in
from breakgraph.graph.op_facts import OpTable, parts_of
from breakgraph.graph.refusals import cuda_transfer_fault, forbidden_fault, form_fault, op_fault, refuse


class CudaRecorder(TorchDispatchMode):
    """Lets every operator through; notes what it reads from outside, what it launches, and on which stream.

    Attributes:
        enabled: Set while a segment is open; otherwise everything passes.
        pins: Storages the open segment reads that were not produced in this capture, by identity.
        num_ops: Operators of the open segment that must have put a node into the graph.
        side_streams: Streams other than the capture stream that were launched on, in any segment.
    """

    supports_higher_order_operators = True

    def __init__(self, stream: torch.cuda.Stream, check_storage: Callable[[torch.UntypedStorage], None]) -> None:
        super().__init__()
        self.enabled = False
        self.pins: dict[int, torch.UntypedStorage] = {}
        self.num_ops = 0
        self.side_streams: dict[int, torch.cuda.Stream] = {}
        self._device_index, self._raw_stream = stream.device.index, stream.cuda_stream
        self._check_storage = check_storage
        self._produced: set[int] = set()
        self._ops = OpTable("cuda")

    def start(self) -> None:
        """Open a segment."""
        self.enabled, self.pins, self.num_ops = True, {}, 0

    def note_reads(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Pin what is read and was not made in this capture; returns the addresses of the storages."""
        addresses = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            addresses.append(address)
            if address not in self._produced and storage._cdata not in self.pins:
                self._check_storage(storage)
                self.pins[storage._cdata] = storage
        return addresses

    def note_made(self, tensors: Iterable[torch.Tensor]) -> bool:
        """These were made in this capture; returns whether any of them has bytes on the device."""
        has_made = False
        for tensor in tensors:
            if tensor.is_cuda and tensor.numel():
                self._produced.add(tensor.untyped_storage().data_ptr())
                has_made = True
        return has_made

    def _note_stream(self) -> None:
        # The address of the stream, not an object made for it: this is asked for at every launch.
        if torch._C._cuda_getCurrentRawStream(self._device_index) != self._raw_stream:
            current = torch.cuda.current_stream(self._device_index)
            self.side_streams[current.cuda_stream] = current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.enabled:
            return func(*args, **kwargs)
        given = tensors_in(*args, *kwargs.values())
        fault = form_fault(func, given)
        if fault is not None:
            refuse(fault)
        facts = self._ops[func]
        if facts.is_composite:
            with self:
                return parts_of(func, args, kwargs)
        if facts.is_suspect:
            fault = op_fault(func, args) or cuda_transfer_fault(func, args, kwargs, given)
            if fault is not None:
                refuse(fault)
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            fault = forbidden_fault(func, error)
            if fault is not None:
                refuse(fault, error)
            raise
        addresses = self.note_reads(given)
        made = [t for t in tensors_in(out) if t.untyped_storage().data_ptr() not in addresses]
        has_made = bool(made) and self.note_made(made)
        if facts.is_launched and (has_made or (facts.is_mutable and any(t.is_cuda and t.numel() for t in given))):
            self.num_ops += 1
            self._note_stream()
        return out
