"""Capturing one plan: segments closed at breaks, breaks run on real data, results carried over boundaries."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.errors import (
    BreakArgumentError,
    BreakResultError,
    CaptureError,
    StalePoolTensorError,
    UncapturableOpError,
)
from breakgraph.graph.boundary import ResultStore, view_of
from breakgraph.graph.device import Block, CaptureSession, Device, Pool, Segment
from breakgraph.graph.eager_break import BreakSpec, run_plain
from breakgraph.graph.effects import tensors_in
from breakgraph.graph.live import Live
from breakgraph.graph.modes import ExecMode
from breakgraph.graph.op_facts import OpTable
from breakgraph.graph.outputs import copy_into
from breakgraph.graph.plan import EagerStep, GraphStep
from breakgraph.graph.refusals import HOST_SYNC, Fault, HostReadGuard, applies_functions, source_line
from breakgraph.graph.tree import (
    Tree,
    describe,
    is_constant,
    is_scattered,
    is_transformed,
    layout_of,
    tree_leaves,
    tree_map,
)


class _FirstRun(TorchDispatchMode):
    """Watches a break's first run: the streams it launches on, the storages it makes, what it reads on the host."""

    supports_higher_order_operators = True

    def __init__(self, device: Device, ops: OpTable) -> None:
        super().__init__()
        self._device = device
        self._ops = ops
        self._main = device.current_stream()
        self.side_streams: list[Any] = []
        self.made: dict[int, StorageWeakRef] = {}
        self.host_read: str | None = None

    def guard(self) -> HostReadGuard:
        """Sees the host reads that the dispatcher does not."""
        guard = self._device.host_guard(self._note_read, tags=False)
        guard.enabled = True
        return guard

    def _note_read(self, fault: Fault) -> AbstractContextManager[None]:
        if fault.kind == HOST_SYNC:
            self.host_read = self.host_read or source_line()
        return nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self._device.current_stream()
        if stream != self._main and stream not in self.side_streams:
            stream.wait_stream(self._main)  # as every replay makes it wait, which will know of it beforehand
            self.side_streams.append(stream)
        if not applies_functions(func) and self._ops[func].reads_host:
            self.host_read = self.host_read or source_line()
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _dense(*args, *(kwargs or {}).values())}
        for tensor in _dense(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.made:
                self.made[storage._cdata] = StorageWeakRef(storage)
        return out


def _dense(*values: Any) -> list[torch.Tensor]:
    """The tensors that are one piece of memory."""
    return [tensor for tensor in tensors_in(*values) if not is_scattered(tensor)]


def _cut_off(result: Tree, arguments: Sequence[torch.Tensor], spec: BreakSpec) -> Tree:
    given = [tensor for tensor in arguments if tensor.requires_grad]
    if not (given and torch.is_grad_enabled()):
        return result

    def cut(leaf: Any, path: str) -> Any:
        is_new = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and all(leaf is not t for t in arguments)
        return _CutOff.apply(spec.name, [leaf], *given) if is_new else leaf

    return tree_map(cut, result)


class _CutOff(torch.autograd.Function):
    """A result of a break as the code behind it sees it. For autograd it was made of what the break was given, and a
    gradient that comes this way is refused."""

    @staticmethod
    def forward(ctx: Any, name: str, result: list[torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return result[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise UncapturableOpError(
            f"a gradient is to pass through the break {ctx.name}, which Python runs at every replay, and autograd then "
            "does not; do without that break (backend 'full'), put the forward and its gradient into one break, or "
            "detach what it is given"
        )


class CaptureBuilder:
    """The capture of this thread. Marked calls reach it through ``eager_break.active``.

    Borrows: device, pool. Gives away: a whole plan's steps and pins, or, when the capture failed, graphs to be parked.
    """

    def __init__(
        self, device: Device, pool: Pool, stream: Any, breaks: bool, constants: Sequence[Any] = ()
    ) -> None:  # fmt: skip
        self.steps: list[GraphStep | EagerStep] = []
        self.pins: dict[int, torch.UntypedStorage] = {}
        self._device = device
        self._pool = pool
        self._breaks = breaks
        self._mode = ExecMode.current(device.torch_device.type)
        self._in_break = False
        self._constants = iter(constants)
        self._declared: list[Any] = []
        self._pending: EagerStep | None = None
        self._failure: BaseException | None = None
        self._made_in_breaks: dict[int, tuple[StorageWeakRef, str]] = {}
        self._ops = OpTable(device.torch_device.type)
        self._older: list[Block] = pool.live_blocks()
        self._session: CaptureSession = device.open_capture(pool, stream, self._check_storage)

    def build(self, fn: Callable[[], Tree], places: Tree) -> None:
        """Capture ``fn``; its outputs end in ``places``. On an error everything is dropped and the error passed on."""
        importlib.import_module("torch._dynamo")  # dispatch modes import it when first used: not inside a segment
        try:
            with self._session:
                self._session.begin()
                outputs = fn()
                if self._failure is not None:
                    raise self._failure  # the captured function swallowed it, and went on without a segment
                copy_into(places, outputs)
                del outputs
                self._take(self._session.end())
        except BaseException:
            self._session.abort()
            raise

    @property
    def pool_peak_bytes(self) -> int:
        """Most bytes of the pool that the plan had in use at the same time."""
        return self._session.pool_peak_bytes

    @property
    def new_blocks(self) -> list[Block]:
        """Pool blocks that are live now and were not before this capture."""
        older = {block.address for block in self._older}
        return [block for block in self._pool.live_blocks() if block.address not in older]

    def call_break(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tree:  # fmt: skip
        """A marked call while this thread captures: closes the segment, runs the break, opens the next segment."""
        if not (self._breaks or spec.always) or self._in_break or self._failure is not None:
            return run_plain(spec, fn, args, kwargs)
        try:
            return self._break(spec, fn, args, kwargs)
        except BaseException as error:
            self._failure = error
            raise

    def constant(self, value: Any, read: Callable[[], Any]) -> Any:
        """A declared constant. What captured code declares was read in the warm-up: nothing is computed here."""
        if self._in_break or not isinstance(value, torch.Tensor):
            found = read()
            self._declared += [leaf for _, leaf in tree_leaves(found)]
            return found
        try:
            return next(self._constants)
        except StopIteration:
            raise CaptureError(
                "breakgraph.constant() is called more often in the capture than in the warm-up; a captured function "
                "must do the same at every call"
            ) from None

    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        """Run a call whose operators the dispatcher does not show, and which reads these tensors."""
        return self._session.unwatched(call, reads)

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run compiled code that reads nothing but its arguments, numbers and tensors."""
        return self._session.compiled(call, args)

    @property
    def is_recording(self) -> bool:
        """Whether what this thread does now goes into a segment."""
        return not self._in_break

    def _break(self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]) -> Tree:
        originals: list[torch.Tensor] = []
        with self._session.main_stream():
            segment = self._session.end()
            with self._session.unguarded():
                self._take(segment)
                step = self._bind(spec, fn, args, kwargs, originals)
                step.results = self._results_of(step)
            self._session.begin()
            carried = step.results.allocate(originals)
            self._pending = step
            self.steps.append(step)
        return _cut_off(carried, originals, spec)

    def _results_of(self, step: EagerStep) -> ResultStore:
        """Run the break, and decide how what it returns will cross."""
        # The captured code entered it around this call.
        step.mode = ExecMode.current(self._device.torch_device.type).around_break(self._mode)
        self._in_break = True
        try:
            result = self._run_first(step)
        finally:
            self._in_break = False
        mutated = [i for i, t in enumerate(step.tensors) if any(t is m for m in step.mutated)]
        return ResultStore(step.spec, result, step.tensors, mutated)

    def _take(self, segment: Segment) -> None:
        """Keep a closed segment and run it once: the break that follows sees real data, as it will at every replay."""
        self._pool.refresh()
        self.pins.update((pin._cdata, pin) for pin in segment.pins if not self._pool.owns(pin.data_ptr()))
        self.steps.append(GraphStep(segment))
        if self._pending is not None:
            pending, self._pending = self._pending, None
            assert pending.results is not None
            pending.writable += pending.results.detach_from(self._pool)
            with pending.scope():
                pending.results.fill_first()
        segment.replay()

    def _bind(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any],
        originals: list[torch.Tensor],
    ) -> EagerStep:  # fmt: skip
        """Arguments that stay right at every replay: views of pool memory, pinned outside tensors, constants."""
        tensors: list[torch.Tensor] = []

        def bind(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if is_constant(leaf) or isinstance(leaf, torch.nn.Module | torch.Size):
                    return leaf
                if any(leaf is value for value in (*args, *kwargs.values())) and isinstance(leaf, Live):
                    return leaf
                raise BreakArgumentError(
                    f"argument {path} of break {spec.name} is {describe(leaf)}, which would keep its capture-time "
                    "state at every replay; pass tensors and constants, and read what changes from step to step inside "
                    "the break, from the step's own context"
                )
            bound = self._bind_tensor(leaf, path, spec)
            originals.append(leaf)
            tensors.append(bound)
            return bound

        # As they were given: what wraps a function may tell keywords from positions, though its signature does not.
        names = spec.positions(args, kwargs)
        given = tuple(tree_map(bind, value, name) for name, value in zip(names, args, strict=True))
        named = {name: tree_map(bind, value, name) for name, value in kwargs.items()}
        mutated = spec.mutated(given, named)
        return EagerStep(self._device, self._pool, spec, fn, given, named, tensors, mutated)

    def _bind_tensor(self, tensor: torch.Tensor, path: str, spec: BreakSpec) -> torch.Tensor:
        if is_scattered(tensor):
            raise BreakArgumentError(
                f"argument {path} of break {spec.name} is a {layout_of(tensor)} tensor, whose memory a plan cannot "
                "hold; read it inside the break, from an object that keeps it"
            )
        if is_transformed(tensor):
            raise BreakArgumentError(
                f"argument {path} of break {spec.name} is inside of a transform of torch.func (vmap, grad), and a "
                "break cannot be there; put the whole transform into the break, or do without one"
            )
        storage = tensor.untyped_storage()
        self._check_storage(storage)
        if self._pool.owns(storage.data_ptr()):
            return view_of(tensor, self._pool)
        if self._device.is_transient_host(tensor):
            raise BreakArgumentError(
                f"argument {path} of break {spec.name} is a host tensor ({describe(tensor)}) in ordinary memory: "
                "replays would read its capture-time values; make it on the device, pin it, or read it inside the break"
            )
        self.pins[storage._cdata] = storage
        return tensor.detach()

    def _run_first(self, step: EagerStep) -> Tree:
        watch = _FirstRun(self._device, self._ops)
        self._declared = []
        with step.scope(), watch.guard(), watch:
            result = step.call()
        self._check_read_values(result, watch, step.spec)
        step.side_streams = watch.side_streams
        self._device.join(step.side_streams)
        self._made_in_breaks.update((cdata, (ref, step.spec.name)) for cdata, ref in watch.made.items())
        return result

    def _check_read_values(self, result: Tree, watch: _FirstRun, spec: BreakSpec) -> None:
        """A number that a break read from a tensor must not steer the code after it, which does not run again."""
        if watch.host_read is None:
            return
        declared = [(type(value), value) for value in self._declared]
        for path, leaf in tree_leaves(result, f"{spec.name} result"):
            if isinstance(leaf, bool | int | float | complex) and (type(leaf), leaf) not in declared:
                raise BreakResultError(
                    f"{path} is {leaf!r}, and the break reads a tensor on the host ({watch.host_read}): code after the "
                    "break would keep this value; return a tensor, keep the decision inside the break, or declare the "
                    "value with breakgraph.constant()"
                )

    def _check_storage(self, storage: torch.UntypedStorage) -> None:
        """Raises for a pool tensor of another plan, and for one that a break made and handed on behind our back."""
        if self._older:
            address = storage.data_ptr()
            if any(block.address <= address < block.address + block.nbytes for block in self._older):
                raise StalePoolTensorError(
                    f"a tensor at {address:#x} belongs to this pool and is older than the plan being captured: other "
                    "plans overwrite it; clone it outside the captured function"
                )
        made = self._made_in_breaks.get(storage._cdata)
        if made is not None and not made[0].expired():
            raise BreakResultError(
                f"a tensor made inside break {made[1]} is used after it without being its result: replays would read "
                "the capture-time one; return it from the break"
            )

    def hand_over(self) -> tuple[list[GraphStep | EagerStep], list[torch.UntypedStorage]]:
        """The steps and the pins of the whole plan; the builder, which may live on in a cycle, keeps neither."""
        steps, pins = self.steps, list(self.pins.values())
        self.steps, self.pins = [], {}
        return steps, pins

    def drop(self) -> list[Segment]:
        """Give up: forgets everything but the closed segments, whose graphs the family destroys when it closes."""
        segments = [step.segment for step in self.steps if isinstance(step, GraphStep)]
        for segment in segments:
            segment.retire()
        self.steps, self.pins, self._pending = [], {}, None
        return segments
