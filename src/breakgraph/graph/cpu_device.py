"""The CPU device: the rules of CUDA graphs on a laptop. It claims no speed.

What it cannot see: races between streams; what a kernel does inside (an opaque operator's declared effects are
believed, what it writes counts as not read, its own host reads go unnoticed); CUDA addresses; ``x.to(device)``, since
every tensor is there already (only the word "cpu" shows); which rows ``index_put_`` and its like reach; host tensors
that factories without a device make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.errors import UndeclaredWriteError
from breakgraph.graph.compiled import without_mode
from breakgraph.graph.cpu_pool import CpuPool
from breakgraph.graph.cpu_record import Allocation, CpuRecorder, Entry, is_host, map_tensors, tag_host, tagged
from breakgraph.graph.cpu_words import describe_entry
from breakgraph.graph.device import CaptureSession, Device, Peak, Pool, RecordedCall, Segment
from breakgraph.graph.effects import reads_and_writes
from breakgraph.graph.op_facts import OpTable, parts_of
from breakgraph.graph.pretence import as_if_capturing
from breakgraph.graph.refusals import Fault, HostReadGuard, applies_functions, cpu_transfer_fault, refuse


class CpuSegment(Segment):
    """A tape and the pool it runs on."""

    def __init__(self, pool: CpuPool, tape: list[Entry], pins: Sequence[torch.UntypedStorage]) -> None:
        self._pool = pool
        self._tape = tape
        self.pins = pins
        self.num_ops = self.num_nodes = sum(not isinstance(entry, Allocation) for entry in tape)

    def replay(self) -> None:
        for entry in self._tape:
            entry.run(self._pool)

    def recorded(self, outside: dict[int, int]) -> list[RecordedCall]:
        baked = self._pool, {pin.data_ptr() for pin in self.pins}, outside
        return [describe_entry(entry, *baked) for entry in self._tape if not isinstance(entry, Allocation)]

    def retire(self) -> None:
        self._tape = []
        self.pins = []

    def close(self) -> None:
        self.retire()


class _CpuGuard(HostReadGuard):
    """Besides, leaves out a check of values that `one_hot` makes on a CPU and not on a GPU: it would be a host read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.enabled and func is torch.nn.functional.one_hot:
            index, num_classes = _one_hot_arguments(*args, **(kwargs or {}))
            if num_classes >= 0 and not is_host(index):
                made = torch.zeros((*index.shape, num_classes), dtype=torch.int64, device=index.device)
                return made.scatter_(-1, index.unsqueeze(-1), 1)
        return super().__torch_function__(func, types, args, kwargs)


def _one_hot_arguments(tensor: torch.Tensor, num_classes: int = -1) -> tuple[torch.Tensor, int]:
    return tensor, num_classes


def _host_guard(
    report: Callable[[Fault], AbstractContextManager[None]],
    tag: Callable[[torch.Tensor], None] | None = tag_host,
) -> HostReadGuard:
    return _CpuGuard(lambda t: not is_host(t), tag, report)


class CpuCapture(CaptureSession):
    """Recorder and host guard around one plan's capture."""

    def __init__(self, pool: CpuPool, check_storage: Callable[[torch.UntypedStorage], None]) -> None:
        self._pool = pool
        self._older_bytes = 0
        self.pool_peak_bytes = 0
        self._recorder = CpuRecorder(pool, check_storage)
        self._guard = _host_guard(refuse)
        self._scope = ExitStack()
        self._told = ExitStack()

    def __enter__(self) -> CpuCapture:
        self._scope.enter_context(self._guard)
        self._scope.enter_context(self._recorder)
        self._older_bytes = self._pool.restart_peak()
        return self

    def __exit__(self, *exc: object) -> None:
        self._told.close()
        self._scope.close()
        self._recorder.clear()

    def begin(self) -> None:
        self._recorder.start()
        self._guard.enabled = True
        self._told.enter_context(as_if_capturing(breaks=True))

    def end(self) -> CpuSegment:
        tape, pins = self._recorder.tape, list(self._recorder.pins.values())
        assert tape is not None, "no segment is open"
        self._recorder.check_unseeded()
        self.abort()
        self.pool_peak_bytes = self._pool.peak_bytes - self._older_bytes
        return CpuSegment(self._pool, tape, pins)

    def abort(self) -> None:
        self._told.close()
        self._guard.enabled = False
        self._recorder.tape, self._recorder.pins = None, {}

    def unguarded(self) -> AbstractContextManager[None]:
        return without_mode(self._guard)

    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        # An emulated graph is made of operators: the code runs as if it had not been compiled.
        with torch.compiler.set_stance("force_eager"):
            return call()

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        self._guard.enabled = False  # nothing in it is for the guard to judge
        try:
            return self._recorder.record_compiled(call, args)
        finally:
            self._guard.enabled = True

    def main_stream(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _InBreak:
    """An operator's name in an error, put together only if there is one."""

    func: torch._ops.OpOverload

    def __str__(self) -> str:
        return f"{self.func} in an eager break"


class _BreakWatch(TorchDispatchMode):
    """Checks what a break reads from the pool, and what it writes there against what it declares."""

    supports_higher_order_operators = True

    def __init__(self, pool: CpuPool, writable: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._pool = pool
        self._writable = {t.untyped_storage().data_ptr() for t in writable}
        self._ops = OpTable("cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if applies_functions(func):
            return func(*args, **kwargs)
        facts = self._ops[func]
        if facts.is_composite:
            with self:
                return parts_of(func, args, kwargs)
        if facts.is_view or facts.allocates_only:
            return func(*args, **kwargs)
        reads, writes = reads_and_writes(func, args, kwargs)
        for tensor in reads:
            if (span := self._pool.span(tensor)) is not None:
                self._pool.check_written(span, _InBreak(func))
        out = func(*args, **kwargs)
        for tensor in writes:
            if (span := self._pool.span(tensor)) is not None:
                if tensor.untyped_storage().data_ptr() not in self._writable:
                    raise UndeclaredWriteError(
                        f"{func} in an eager break wrote into an argument that segments share; name it in "
                        "@eager_on_graph(mutates=(...))"
                    )
                self._pool.mark_written(span)
        return out


class CpuDevice(Device):
    """Emulates capture and replay; has no streams."""

    torch_device = torch.device("cpu")
    emulated = True

    def new_pool(self) -> CpuPool:
        return CpuPool()

    def take_stream(self) -> None:
        return None

    def give_stream(self, stream: Any) -> None:
        """There are no streams here."""

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def open_capture(
        self, pool: Pool, stream: Any, check_storage: Callable[[torch.UntypedStorage], None]
    ) -> CpuCapture:
        assert isinstance(pool, CpuPool)
        return CpuCapture(pool, check_storage)

    def current_stream(self) -> None:
        return None

    def break_scope(self, pool: Pool, writable: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        assert isinstance(pool, CpuPool)
        return _BreakWatch(pool, writable)

    def fork(self, side_streams: Sequence[Any]) -> None:
        """There are no streams here."""

    def join(self, side_streams: Sequence[Any]) -> None:
        """There are no streams here."""

    def is_transient_host(self, tensor: torch.Tensor) -> bool:
        return is_host(tensor)

    def host_guard(
        self, report: Callable[[Fault], AbstractContextManager[None]], *, tags: bool = True
    ) -> HostReadGuard:
        return _host_guard(report, tag_host if tags else None)

    def transfer_fault(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> Fault | None:
        return cpu_transfer_fault(func, given, is_host)

    def default_generators(self) -> Sequence[torch.Generator]:
        return (torch.default_generator,)

    def from_host(self, given: Sequence[torch.Tensor], out: Any) -> Any:
        return map_tensors(out, tagged) if given and all(is_host(t) for t in given) else out

    def begin_replay(self, pool: Pool, last_stream: Any) -> None:
        assert isinstance(pool, CpuPool)
        pool.begin_replay()

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Nothing runs behind the host's back here."""

    def peak_of(self, run: Callable[[], object]) -> Peak:
        """Not measured here: what runs eagerly takes ordinary memory of the host."""
        run()
        return Peak()

    def driver_bytes(self) -> None:
        return None

    def release_cached(self) -> None:
        """Nothing is cached here."""

    def check_usable(self) -> None:
        """The emulation holds no state outside its objects, so it is always usable."""

    def after_failure(self) -> None:
        """See :meth:`check_usable`."""
