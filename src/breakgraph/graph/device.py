"""What the capture library asks of a device.

Two implementations: :mod:`cuda_device` wraps ``torch.cuda.CUDAGraph`` (ROCm comes with it), :mod:`cpu_device` emulates
the same rules on the CPU. Everything above this file is written once, for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from breakgraph.errors import UnknownNameError
from breakgraph.graph.refusals import Fault, HostReadGuard


@dataclass(frozen=True, slots=True)
class Peak:
    """What something took at its most, beyond what was held before; None on a device that does not measure it.

    Attributes:
        allocated_bytes: Tensors that were alive at the same time.
        reserved_bytes: What torch took from the driver for them: rounding and pieces that fit nothing are in it.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class Block(NamedTuple):
    """A run of pool memory: first address, size in bytes."""

    address: int
    nbytes: int


class Pool(ABC):
    """The memory that segments allocate from. Owned and closed by its plan family.

    Attributes:
        broken: Why nothing more can be captured into it; None while it is sound. Plans that it holds still replay.
    """

    broken: str | None = None
    _views: dict[tuple[int, int], torch.UntypedStorage]

    def is_view(self, storage: torch.UntypedStorage) -> bool:
        """Whether :meth:`view_storage` made ``storage``: it shows pool bytes and keeps none of them alive."""
        return any(view._cdata == storage._cdata for view in self._views.values())

    @abstractmethod
    def refresh(self) -> None:
        """Learn of memory that was reserved since the last call; after every segment."""

    @abstractmethod
    def owns(self, address: int) -> bool:
        """Whether ``address`` lies in this pool, whatever the state of its block."""

    @abstractmethod
    def live_blocks(self) -> list[Block]:
        """Blocks that a tensor still holds."""

    @abstractmethod
    def view_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage on the same bytes that does not keep the block alive."""

    @property
    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes taken from the device, used or not."""

    @abstractmethod
    def reserve(self, runs: Sequence[int]) -> None:
        """Hold free runs of at least these sizes, each in one piece, for what runs on the current stream."""

    @abstractmethod
    def tracing(self) -> AbstractContextManager[list[tuple[int, int]]]:
        """Note what is allocated and given back inside; the list, see :class:`AllocationTrace`, is whole at the end."""

    @abstractmethod
    def poison(self) -> int:
        """Fill every free block with 0xFF bytes (NaN in every float type); returns the bytes filled."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. All graphs on it must be gone."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator or kernel of a segment, or a break, in words that are equal for two captures of the same thing.

    Attributes:
        name: Of the operator, kernel or break.
        arguments: What each argument is, addresses told as places: a block and an offset.
        unread: Arguments that could not be read or classified.
    """

    name: str
    arguments: dict[str, str]
    unread: tuple[str, ...] = ()


class Segment(ABC):
    """One captured graph. ``num_ops`` were dispatched, ``num_nodes`` recorded; ``pins`` keep what it reads alive."""

    num_ops: int
    num_nodes: int
    pins: Sequence[torch.UntypedStorage]

    @abstractmethod
    def replay(self) -> None:
        """Launch on the current stream."""

    @abstractmethod
    def recorded(self, outside: dict[int, int]) -> list[RecordedCall]:
        """The calls in their order.

        Args:
            outside: Numbers of the storages outside the pool, by address, in the order of their first use; continued.
        """

    @abstractmethod
    def retire(self) -> None:
        """Let go of what the graph reads: it will not be launched again."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the graph."""


class CaptureSession(ABC):
    """The capture of one plan: segments opened and closed in turn, on one pool and one stream.

    A context manager: it watches the dispatcher from entry to exit, so that captured code may open and close modes of
    its own anywhere. Between segments it lets everything through.

    Attributes:
        pool_peak_bytes: Most bytes of the pool that this plan had in use at the same time, in the segments closed so
            far: activations, boundaries, and what operators take for themselves, rounded up as the allocator rounds.
    """

    pool_peak_bytes: int

    @abstractmethod
    def __enter__(self) -> CaptureSession: ...

    @abstractmethod
    def __exit__(self, *exc: object) -> None: ...

    @abstractmethod
    def begin(self) -> None:
        """Open a segment: what this thread launches from here is recorded, not run."""

    @abstractmethod
    def end(self) -> Segment:
        """Close the open segment. On an error nothing is left open."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the open segment, if there is one, and leave the stream not capturing."""

    @abstractmethod
    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        """Run compiled code in the open segment, see ``compiled.py``; ``reads`` are kept alive as what it reads."""

    @abstractmethod
    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run compiled code in the open segment that reads nothing but ``args``: tensors and numbers."""

    @abstractmethod
    def unguarded(self) -> AbstractContextManager[None]:
        """Take the watch over function calls off this thread: between two segments it sees much and says nothing."""

    @abstractmethod
    def main_stream(self) -> AbstractContextManager[Any]:
        """Make the capture stream current, wherever the captured code has gone."""


class Device(ABC):
    """One device of one process."""

    torch_device: torch.device
    emulated: bool

    @abstractmethod
    def new_pool(self) -> Pool:
        """An empty pool."""

    @abstractmethod
    def take_stream(self) -> Any:
        """A stream that nobody else captures on; None where the device has no streams."""

    @abstractmethod
    def give_stream(self, stream: Any) -> None:
        """Take a stream back, once every graph captured on it is gone. Libraries keep a workspace for each stream, so
        the next family gets this one."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current, ordered after the work queued so far and before the work queued later."""

    @abstractmethod
    def open_capture(
        self, pool: Pool, stream: Any, check_storage: Callable[[torch.UntypedStorage], None]
    ) -> CaptureSession:
        """A session that captures one plan; ``check_storage`` sees each storage a segment uses that it did
        not make, and may raise."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream that work is launched on now; None where the device has no streams."""

    @abstractmethod
    def break_scope(self, pool: Pool, writable: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Wraps every run of a break and the storing of its result; ``writable`` are the pool views it may write."""

    @abstractmethod
    def fork(self, side_streams: Sequence[Any]) -> None:
        """Make ``side_streams`` wait for the current stream."""

    @abstractmethod
    def join(self, side_streams: Sequence[Any]) -> None:
        """Make the current stream wait for ``side_streams``."""

    @abstractmethod
    def is_transient_host(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is ordinary host memory, which no replay would see change."""

    @abstractmethod
    def host_guard(
        self, report: Callable[[Fault], AbstractContextManager[None]], *, tags: bool = True
    ) -> HostReadGuard:
        """A guard that tells this device's tensors from the host's; not enabled yet.

        Args:
            report: See :class:`HostReadGuard`.
            tags: Whether tensors that are made meanwhile are marked as the host's, where that is needed to tell.
        """

    @abstractmethod
    def transfer_fault(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[torch.Tensor]
    ) -> Fault | None:
        """What is wrong with an operator on both host and device tensors."""

    @abstractmethod
    def default_generators(self) -> Sequence[torch.Generator]:
        """The generators that graphs know and advance."""

    @abstractmethod
    def from_host(self, given: Sequence[torch.Tensor], out: Any) -> Any:
        """``out`` of an operator on ``given``, marked as the host's where only we know that it is."""

    @abstractmethod
    def begin_replay(self, pool: Pool, last_stream: Any) -> Any:
        """Order this replay after the family's last one; returns the stream that this replay is on."""

    @abstractmethod
    def rng_state(self) -> Any:
        """State of the default generators, for :meth:`set_rng_state`."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Put the default generators back."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    @abstractmethod
    def peak_of(self, run: Callable[[], object]) -> Peak:
        """Measure what ``run`` takes; it must not capture. On CUDA this gives cached memory back and restarts torch's
        peak statistics of the device; other threads' allocations count."""

    @abstractmethod
    def driver_bytes(self) -> int | None:
        """Memory in use that torch's allocator does not hold: contexts, code, graphs, other processes. None where there
        is no driver. Take the difference of two calls; the driver hands out megabytes at a time."""

    @abstractmethod
    def release_cached(self) -> None:
        """Give memory back that torch holds for reuse. Pools keep theirs."""

    @abstractmethod
    def check_usable(self) -> None:
        """Raises CaptureUnavailableError when an earlier failure left this process unable to capture."""

    @abstractmethod
    def after_failure(self) -> None:
        """Find out, after a failed capture, whether this process can still capture."""


_DEVICES: dict[torch.device, Device] = {}


def get_device(device: torch.device | str) -> Device:
    """The :class:`Device` for a torch device, one a process.

    Raises:
        UnknownNameError: no capture on that device type.
    """
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    if wanted not in _DEVICES:
        if wanted.type == "cpu":
            from breakgraph.graph.cpu_device import CpuDevice

            _DEVICES[wanted] = CpuDevice()
        elif wanted.type == "cuda":
            from breakgraph.graph.cuda_device import CudaDevice

            _DEVICES[wanted] = CudaDevice(wanted)
        else:
            raise UnknownNameError("capture device", wanted.type, ("cpu", "cuda"), "move the module to one of these")
    return _DEVICES[wanted]
