"""The CUDA device: ``torch.cuda.CUDAGraph`` behind the device interface. ROCm builds of torch come with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from breakgraph.errors import CaptureUnavailableError, EmptySegmentError
from breakgraph.graph.compiled import without_mode
from breakgraph.graph.cuda_nodes import Driver, Places, known_to, read_graph
from breakgraph.graph.cuda_pool import CudaPool
from breakgraph.graph.cuda_record import CudaRecorder
from breakgraph.graph.device import Block, CaptureSession, Device, Peak, Pool, RecordedCall, Segment
from breakgraph.graph.effects import tensors_in
from breakgraph.graph.pretence import is_capturing
from breakgraph.graph.refusals import Fault, HostReadGuard, cuda_transfer_fault, refuse


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver's library, opened once and not for every segment; None where there is none (ROCm)."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _count_nodes(raw_graph: int) -> int | None:
    """Nodes of a ``cudaGraph_t`` (driver API, cuGraphGetNodes); None where there is no CUDA driver."""
    driver = _driver()
    if driver is None:
        return None
    count = ctypes.c_size_t(0)
    status = driver.cuGraphGetNodes(ctypes.c_void_p(raw_graph), None, ctypes.byref(count))
    return int(count.value) if status == 0 else None


class CudaSegment(Segment):
    """A graph that is launched only if it holds something."""

    def __init__(
        self, pool: CudaPool, graph: torch.cuda.CUDAGraph, num_ops: int, pins: Sequence[torch.UntypedStorage]
    ) -> None:
        self._pool = pool
        self.pins = pins
        self.num_ops = num_ops
        nodes = _count_nodes(graph.raw_cuda_graph())
        self.num_nodes = num_ops if nodes is None else nodes
        self._graph: torch.cuda.CUDAGraph | None = graph
        if self.num_nodes:
            graph.instantiate()

    def replay(self) -> None:
        if self.num_nodes:
            assert self._graph is not None, "the segment was closed"
            self._graph.replay()

    def recorded(self, outside: dict[int, int]) -> list[RecordedCall]:
        assert self._graph is not None, "the segment was closed"
        driver: Driver = ctypes.CDLL("libcuda.so.1")
        pins = [Block(pin.data_ptr(), pin.nbytes()) for pin in self.pins]
        places = Places(self._pool.runs, pins, outside, known_to(driver))
        return read_graph(driver, self._graph.raw_cuda_graph(), places)

    def retire(self) -> None:
        self.pins = []

    def close(self) -> None:
        self.retire()
        if self._graph is not None:
            self._graph.reset()  # explicitly: a traceback may still refer to the graph, and the pool outlives no graph
        self._graph = None


def _host_guard(report: Callable[[Fault], AbstractContextManager[None]]) -> HostReadGuard:
    return HostReadGuard(lambda t: t.is_cuda, None, report)


class CudaCapture(CaptureSession):
    """Segments on one capture stream. Side streams that a segment forked are joined when it ends, and forked again at
    the head of the next, since the captured code goes on using them."""

    def __init__(
        self, pool: CudaPool, stream: torch.cuda.Stream, check_storage: Callable[[torch.UntypedStorage], None]
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._recorder = CudaRecorder(stream, check_storage)
        self._guard = _host_guard(refuse)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._scope = ExitStack()
        self.pool_peak_bytes = 0
        self._older_bytes = 0
        self._begun_with = 0

    def __enter__(self) -> CudaCapture:
        self._scope.enter_context(self._guard)
        self._scope.enter_context(self._recorder)
        self._pool.refresh()
        self._older_bytes = self._pool.live_bytes
        return self

    def __exit__(self, *exc: object) -> None:
        self._scope.close()
        self._recorder.pins = {}  # the recorder may live on in a reference cycle

    def main_stream(self) -> AbstractContextManager[Any]:
        current = torch.cuda.current_stream(self._stream.device)
        if current == self._stream:
            return nullcontext()
        self._recorder.side_streams[current.cuda_stream] = current
        return torch.cuda.stream(self._stream)

    def unguarded(self) -> AbstractContextManager[None]:
        return without_mode(self._guard)

    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        self._recorder.note_reads(reads)
        with without_mode(self._guard), _disable_current_modes():
            out = call()
        self._recorder.note_made(tensors_in(out))
        return out

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        return self.unwatched(lambda: call(*args), tensors_in(*args))

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._pool.refresh()  # boundaries of the segment before have been let go of since
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
            self._graph = graph
            # After the begin, which may allocate for random generators.
            torch.cuda.reset_peak_memory_stats(self._stream.device)
            self._begun_with = self._active_bytes("current")
            for side in self._recorder.side_streams.values():
                side.wait_stream(self._stream)
        self._recorder.start()
        self._guard.enabled = True

    def end(self) -> CudaSegment:
        assert self._graph is not None, "no segment is open"
        graph, pins = self._graph, list(self._recorder.pins.values())
        self._recorder.enabled = self._guard.enabled = False
        try:
            self._end_graph(graph)
        except BaseException:
            self.abort()
            raise
        self._graph = None
        # While a segment is open, this thread allocates from the pool only: torch's peak is the pool's.
        risen = self._active_bytes("peak") - self._begun_with
        in_use = self._pool.live_bytes - self._older_bytes
        self.pool_peak_bytes = max(self.pool_peak_bytes, in_use + risen)
        segment = CudaSegment(self._pool, graph, self._recorder.num_ops, pins)
        if segment.num_ops and not segment.num_nodes:
            self._pool.keep(graph)
            raise EmptySegmentError(
                f"{segment.num_ops} operators ran while a segment was captured and its graph is empty: they were "
                "launched on a stream that is not being captured; use the current stream, or warm up on it"
            )
        return segment

    def _active_bytes(self, which: str) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self._stream.device)["active_bytes"]["all"][which])

    def _end_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            for side in self._recorder.side_streams.values():
                with torch.cuda.stream(side):
                    is_out = is_capturing()
                if is_out:
                    self._stream.wait_stream(side)
            graph.capture_end()

    def abort(self) -> None:
        self._recorder.enabled = self._guard.enabled = False
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            self._end_graph(graph)
        except RuntimeError as error:
            # CUDA invalidated the capture. The device allocator still routes this stream to the pool, which can be
            # ended; the host allocator does too (torch 2.11), which cannot: no capture can use this pool again.
            self._pool.broken = str(error).splitlines()[0]
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool.id)
        self._pool.keep(graph)


class CudaDevice(Device):
    """One GPU of this process."""

    emulated = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._broken: str | None = None
        self._idle_streams: list[torch.cuda.Stream] = []

    def new_pool(self) -> CudaPool:
        return CudaPool(self.torch_device)

    def take_stream(self) -> torch.cuda.Stream:
        return self._idle_streams.pop() if self._idle_streams else torch.cuda.Stream(self.torch_device)

    def give_stream(self, stream: Any) -> None:
        self._idle_streams.append(stream)

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            outer.wait_stream(stream)

    def open_capture(
        self, pool: Pool, stream: Any, check_storage: Callable[[torch.UntypedStorage], None]
    ) -> CudaCapture:
        assert isinstance(pool, CudaPool)
        return CudaCapture(pool, stream, check_storage)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def break_scope(self, pool: Pool, writable: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        return nullcontext()

    def fork(self, side_streams: Sequence[Any]) -> None:
        main = self.current_stream()
        for side in side_streams:
            side.wait_stream(main)

    def join(self, side_streams: Sequence[Any]) -> None:
        main = self.current_stream()
        for side in side_streams:
            main.wait_stream(side)

    def is_transient_host(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_cuda and not tensor.is_pinned()

    def host_guard(
        self, report: Callable[[Fault], AbstractContextManager[None]], *, tags: bool = True
    ) -> HostReadGuard:
        return _host_guard(report)

    def transfer_fault(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> Fault | None:
        return cuda_transfer_fault(func, args, kwargs, given)

    def default_generators(self) -> Sequence[torch.Generator]:
        return torch.cuda.default_generators

    def from_host(self, given: Sequence[torch.Tensor], out: Any) -> Any:
        return out

    def begin_replay(self, pool: Pool, last_stream: Any) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self.torch_device)
        if last_stream is not None and current != last_stream:
            current.wait_stream(last_stream)
        return current

    def rng_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_of(self, run: Callable[[], object]) -> Peak:
        device = self.torch_device
        self.synchronize()
        self.release_cached()
        torch.cuda.reset_peak_memory_stats(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        run()
        self.synchronize()
        return Peak(
            torch.cuda.max_memory_allocated(device) - allocated, torch.cuda.max_memory_reserved(device) - reserved
        )

    def driver_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free - torch.cuda.memory_reserved(self.torch_device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def check_usable(self) -> None:
        if self._broken is not None:
            raise CaptureUnavailableError(f"this process can no longer capture on {self.torch_device}: {self._broken}")

    def after_failure(self) -> None:
        try:
            probe, value = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.torch_device)
            with self.on_stream(torch.cuda.Stream(self.torch_device)):
                probe.capture_begin(capture_error_mode="thread_local")
                value.add_(1)
                probe.capture_end()
            probe.replay()
            self.synchronize()
        except RuntimeError as error:
            self._broken = f"a probe after an earlier failure ended with {error}"
