"""Recording on the CPU device: operators become entries on a tape; nothing is computed until the tape is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from breakgraph.errors import UncapturableOpError
from breakgraph.graph.boundary import with_bits_of
from breakgraph.graph.cpu_pool import CpuPool, Span
from breakgraph.graph.effects import reads_and_writes, tensors_in
from breakgraph.graph.op_facts import OpTable, parts_of
from breakgraph.graph.refusals import cpu_transfer_fault, form_fault, op_fault, refuse
from breakgraph.graph.seeds import FAULT as SEEDED
from breakgraph.graph.seeds import WAY_OUT as SEED_WAY_OUT
from breakgraph.graph.seeds import RecordingSeeds

_HOST_TAG = "_breakgraph_host"


def tag_host(tensor: torch.Tensor) -> None:
    """Mark a tensor that on a GPU would be on the host: 0-dim ones are baked, others refused beside device tensors."""
    setattr(tensor, _HOST_TAG, True)


def is_host(tensor: torch.Tensor) -> bool:
    """Whether :func:`tag_host` marked it, or it was computed from such tensors alone."""
    return getattr(tensor, _HOST_TAG, False)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """An operator argument with ``fn`` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, fn) for item in value)
    return value


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of its strides, also where those leave gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).zero_()


@dataclass(slots=True)
class TapeEntry:
    """One operator: what to call, where its fresh results go, which pool bytes it reads and writes."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor | None]  # None: the result is an argument
    reads: list[Span]
    writes: list[Span]

    def run(self, pool: CpuPool) -> None:
        """Run the operator on the recorded addresses."""
        is_whole = all(map(pool.is_written, self.reads))
        if not (is_whole or self._moves_within(pool)):
            for span in self.reads:
                pool.check_written(span, self.func)
        produced = tensors_in(self.func(*self.args, **self.kwargs))
        for target, value in zip(self.results, produced, strict=False):
            if target is not None:
                if target.shape != value.shape:
                    raise UncapturableOpError(
                        f"{self.func} recorded a result of shape {list(target.shape)} and produced {list(value.shape)}"
                    )
                target.copy_(value)
        for span in self.writes:
            pool.mark_written(span)
        if not is_whole:
            pool.move_marks(*self.args[:2])

    def _moves_within(self, pool: CpuPool) -> bool:
        """Whether it copies from pool to pool, and its result may be as incomplete as its source: a circular padding
        copies borders before it fills them."""
        if self.func is not torch.ops.aten.copy_.default:
            return False
        target, source = self.args[:2]
        return target.shape == source.shape and pool.owns(target.data_ptr()) and pool.owns(source.data_ptr())


@dataclass(slots=True)
class Allocation:
    """Memory that is handed out in the middle of a segment."""

    spans: list[Span]

    def run(self, pool: CpuPool) -> None:
        """Note that its bytes hold nothing of this replay."""
        for span in self.spans:
            pool.mark_written(span, 0)


@dataclass(slots=True)
class CompiledEntry:
    """Code that a compiler wrote, with the dispatcher out of sight. What it writes besides its results is not known:
    its arguments count as read only."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    results: list[torch.Tensor | None]
    reads: list[Span]
    writes: list[Span]

    def run(self, pool: CpuPool) -> None:
        """Run it on the recorded addresses."""
        for span in self.reads:
            pool.check_written(span, "compiled code")
        for target, value in zip(self.results, tensors_in(self.call(*self.args)), strict=True):
            if target is not None:
                target.copy_(value)
        for span in self.writes:
            pool.mark_written(span)


Entry = TapeEntry | CompiledEntry | Allocation


_UNLIKE_META = (
    torch.ops.aten.convolution.default, torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default, torch.ops.aten._embedding_bag.default,
    torch.ops.aten._embedding_bag_forward_only.default, torch.ops.aten._linalg_svd.default,
)  # fmt: skip
"""Operators whose results on a CPU lie otherwise in memory than those of their meta kernels, so that what reads them
rounds otherwise, or leave out what only a backward pass needs."""


@dataclass(slots=True)
class _MetaCall:
    """The same call on meta tensors that share storage as the real ones do: gives shapes, strides and aliasing. Without
    a meta kernel that is as good, on zeros, which are valid indices too."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    real: dict[int, torch.Tensor] = field(default_factory=dict)  # id of a meta argument -> the real one
    real_storage: dict[int, torch.Tensor] = field(default_factory=dict)  # id of a meta storage -> a real tensor on it
    keep: list[torch.Tensor] = field(default_factory=list)

    def argument(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            self.storages[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
        meta_storage = self.storages[key]
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(meta_storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        self.real[id(meta)] = tensor
        self.real_storage[meta_storage._cdata] = tensor
        self.keep.append(meta)
        return meta

    def run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meta_args = map_tensors(args, self.argument)
        meta_kwargs = {name: map_tensors(value, self.argument) for name, value in kwargs.items()}
        if isinstance(meta_kwargs.get("device"), torch.device):
            meta_kwargs["device"] = torch.device("meta")
        if meta_kwargs.get("generator") is not None:
            meta_kwargs["generator"] = None
        if func not in _UNLIKE_META:
            try:
                return func(*meta_args, **meta_kwargs)
            except RuntimeError:
                pass  # none (NotImplementedError is one), or one that asks for more than the kernel does
        self.keep.clear()
        self.real.clear()
        return func(*map_tensors(args, _zeros), **kwargs)


class CpuRecorder(TorchDispatchMode):
    """Puts every operator of this thread on a tape and gives back pool tensors of the right shape, uncomputed.

    Attributes:
        tape: The open segment's operators; None between segments, when everything runs as usual.
        pins: Storages outside the pool that the open segment uses, by identity.
    """

    supports_higher_order_operators = True

    def __init__(self, pool: CpuPool, check_storage: Callable[[torch.UntypedStorage], None]) -> None:
        super().__init__()
        self.pool = pool
        self.tape: list[Entry] | None = None
        self.pins: dict[int, torch.UntypedStorage] = {}
        self._check_storage = check_storage
        self._aliases: dict[tuple[Any, ...], torch.Tensor] = {}
        self._ops = OpTable("cpu")
        self._seeds = RecordingSeeds()

    def start(self) -> None:
        """Open a segment."""
        self.tape, self.pins = [], {}
        self._seeds.start()

    def check_unseeded(self) -> None:
        """Raises UncapturableOpError where the code of the open segment seeded the generator."""
        if self._seeds.is_seeded:
            refuse(SEEDED, way_out=SEED_WAY_OUT)

    def clear(self) -> None:
        """Let go of every tensor; the recorder may live on in a reference cycle."""
        self.tape, self.pins = None, {}
        self._aliases.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tape is None:
            return func(*args, **kwargs)
        given = tensors_in(*args, *kwargs.values())
        fault = form_fault(func, given)
        if fault is not None:
            refuse(fault)
        facts = self._ops[func]
        if facts.is_composite:
            with self:
                return parts_of(func, args, kwargs)
        fault = op_fault(func, args) or cpu_transfer_fault(func, given, is_host)
        if fault is not None:
            refuse(fault)
        if given and all(is_host(t) for t in given):
            return map_tensors(func(*args, **kwargs), tagged)
        if facts.is_view:
            return func(*args, **kwargs)
        call = _MetaCall()
        if facts.is_random:
            self.check_unseeded()
        with self._seeds.kept() if facts.is_random else nullcontext():
            meta_out = call.run(func, args, kwargs)
        results: list[torch.Tensor | None] = []
        out = map_tensors(meta_out, lambda meta: self._result(meta, call, results))
        if facts.allocates_only:
            self._forget(results)
            return out
        if not any(r is not None for r in results) and not facts.is_mutable:
            return out
        self._append(func, args, kwargs, results)
        return out

    def _result(self, meta: torch.Tensor, call: _MetaCall, results: list[torch.Tensor | None]) -> torch.Tensor:
        """The real tensor for one meta result: an argument, a view of one, or new pool memory."""
        if id(meta) in call.real:
            results.append(None)
            return call.real[id(meta)]
        owner = call.real_storage.get(meta.untyped_storage()._cdata)
        if owner is not None:
            results.append(None)
            view = torch.empty(0, dtype=meta.dtype)
            return view.set_(owner.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride())
        fresh = self.pool.empty_strided(meta.shape, meta.stride(), meta.dtype, meta.untyped_storage().nbytes())
        results.append(fresh)
        return fresh

    def _forget(self, results: list[torch.Tensor | None]) -> None:
        """New memory is unwritten, also where an earlier tensor of this replay lay. Not at the head of a segment: there
        boundaries are allocated, which are filled before it runs."""
        assert self.tape is not None
        spans = [s for r in results if r is not None and (s := self.pool.span(r)) is not None]
        if self.tape and spans:
            self.tape.append(Allocation(spans))

    def _append(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: list[torch.Tensor | None]
    ) -> None:
        args = tuple(map_tensors(a, self.alias) for a in args)
        kwargs = {name: map_tensors(value, self.alias) for name, value in kwargs.items()}
        targets = [None if r is None else self.alias(r) for r in results]
        reads, writes = reads_and_writes(func, args, kwargs)
        spans = [[s for t in group if (s := self.pool.span(t)) is not None] for group in (reads, writes)]
        spans[1] += [s for t in targets if t is not None and (s := self.pool.span(t)) is not None]
        assert self.tape is not None
        self.tape.append(TapeEntry(func, args, kwargs, targets, *spans))

    def record_compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Put compiled code on the tape; what its results look like is seen by running it on zeros."""
        assert self.tape is not None, "no segment is open"
        self.check_unseeded()
        with _disable_current_modes(), self._seeds.kept():
            zeros = [_zeros(a) if isinstance(a, torch.Tensor) else a for a in args]
            given = {z.untyped_storage()._cdata: a for z, a in zip(zeros, args, strict=True) if z is not a}
            results: list[torch.Tensor | None] = []
            out = map_tensors(call(*zeros), lambda made: self._compiled_result(made, given, results))
            aliased = tuple(map_tensors(a, self.alias) for a in args)
            targets = [None if r is None else self.alias(r) for r in results]
        reads = [s for t in tensors_in(*aliased) if (s := self.pool.span(t)) is not None]
        writes = [s for t in targets if t is not None and (s := self.pool.span(t)) is not None]
        self.tape.append(CompiledEntry(call, aliased, targets, reads, writes))
        return out

    def _compiled_result(
        self, made: torch.Tensor, given: dict[int, torch.Tensor], results: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """The real tensor for one result: a view of an argument, or new pool memory."""
        storage = made.untyped_storage()
        argument = given.get(storage._cdata)
        if argument is None:
            fresh = self.pool.empty_strided(made.shape, made.stride(), made.dtype, storage.nbytes())
            results.append(fresh)
            return fresh
        results.append(None)
        offset = argument.storage_offset() + made.storage_offset()
        view = torch.empty(0, dtype=made.dtype)
        return view.set_(argument.untyped_storage(), offset, made.shape, made.stride())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the tape holds it: same bytes; pool memory is not kept alive, everything else is pinned."""
        if is_host(tensor):
            return tensor.detach().clone()  # baked, as a kernel argument would be
        storage = tensor.untyped_storage()
        self._check_storage(storage)
        if self.pool.owns(storage.data_ptr()):
            storage = self.pool.view_storage(storage)
        else:
            self.pins[storage._cdata] = storage
        bits = (tensor.is_conj(), tensor.is_neg())
        key = (storage._cdata, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), bits)
        if key not in self._aliases:
            with torch.inference_mode(False):  # the tape is run under the plan's mode, whatever was entered here
                bare = torch.empty(0, dtype=tensor.dtype)
                bare.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
                self._aliases[key] = with_bits_of(tensor, bare)
        return self._aliases[key]


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, after :func:`tag_host`."""
    tag_host(tensor)
    return tensor
