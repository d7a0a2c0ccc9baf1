"""The pool on CUDA: a ``torch.cuda.MemPool`` and what the allocator's snapshot says about it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from breakgraph.graph.device import Block, Pool


class _Address:
    """Tells ``torch.as_tensor`` about bytes that somebody else owns."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def snapshot_of(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """The allocator's segments of one pool.

    torch (2.11) gives up a reference to each argument that is not its own. Numbers above 256 can die of it, and before
    Python 3.12 False too, and Python's heap with them: so a reference is given beforehand. Where torch takes none, the
    numbers stay for ever.
    """
    for argument in (*pool_id, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
    return torch.cuda.memory_snapshot(pool_id, include_traces=False)  # type: ignore[no-any-return]


def allocations_within(
    entries: Sequence[Mapping[str, Any]], ranges: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """(number, bytes) of what was allocated inside ``ranges`` and, a second time, when it was given back.

    Memory that the allocator returned to the driver meanwhile lay in these ranges as somebody else's: the driver hands
    addresses out again. What happened there until then does not count.

    Args:
        entries: Of one device, as ``torch.cuda.memory._snapshot()["device_traces"]`` has them.
        ranges: (first address, end) of each segment.
    """
    numbers = itertools.count()
    live: dict[int, int] = {}
    found: list[tuple[int, int, int]] = []
    for entry in entries:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "segment_free":
            end = address + size
            if any(start < end and address < stop for start, stop in ranges):
                found = [event for event in found if not address <= event[0] < end]
                live = {at: number for at, number in live.items() if not address <= at < end}
        elif action == "alloc" and any(start <= address < stop for start, stop in ranges):
            live[address] = next(numbers)
            found.append((address, live[address], size))
        elif action == "free_completed" and address in live:
            found.append((address, live.pop(address), size))
    return [(number, size) for _, number, size in found]


class CudaPool(Pool):
    """Owns: the MemPool, without which a pool whose only graph is gone fails an internal check of the allocator.

    Closed by: its plan family, after every graph on it.

    Attributes:
        live_bytes: Bytes in use at the last :meth:`refresh`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mem_pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._ranges: list[tuple[int, int]] = []
        self._views: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._kept: list[torch.cuda.CUDAGraph] = []
        self.live_bytes = 0

    def keep(self, graph: torch.cuda.CUDAGraph) -> None:
        """Hold a failed graph until the pool closes: once no graph is on it, the host allocator refuses the pool."""
        self._kept.append(graph)

    @property
    def id(self) -> Any:
        """What ``capture_begin`` takes as ``pool``."""
        assert self.mem_pool is not None, "the pool was closed"
        return self.mem_pool.id

    def _snapshot(self) -> list[dict[str, Any]]:
        if self.mem_pool is None:
            return []
        return snapshot_of(self.id)

    def refresh(self) -> None:
        segments = self._snapshot()
        self._ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
        self.live_bytes = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] != "inactive")

    @property
    def runs(self) -> list[Block]:
        """The runs of memory that the pool had at the last :meth:`refresh`."""
        return [Block(start, end - start) for start, end in self._ranges]

    def owns(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._ranges)

    def _blocks(self) -> list[tuple[str, Block]]:
        blocks = []
        for segment in self._snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                blocks.append((block["state"], Block(address, block["size"])))
                address += block["size"]
        return blocks

    def live_blocks(self) -> list[Block]:
        return [block for state, block in self._blocks() if state != "inactive"]

    @property
    def reserved_bytes(self) -> int:
        return sum(int(segment["total_size"]) for segment in self._snapshot())

    def view_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._views:
            self._views[key] = self._bytes_at(*key).untyped_storage()
        return self._views[key]

    def _bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Address(address, nbytes), device=self._device)

    def reserve(self, runs: Sequence[int]) -> None:
        assert self.mem_pool is not None, "the pool was closed"
        with torch.cuda.use_mem_pool(self.mem_pool):
            held = [
                torch.empty(run, dtype=torch.uint8, device=self._device) for run in sorted(runs, reverse=True) if run
            ]
            del held  # free again, and kept by the pool
        self.refresh()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[list[tuple[int, int]]]:
        """From torch's own record of the allocator, which is left alone where somebody else has switched it on."""
        trace: list[tuple[int, int]] = []
        is_recording = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
        if is_recording():
            yield trace
            return
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1 << 20)
        try:
            yield trace
            entries = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        finally:
            torch.cuda.memory._record_memory_history(None)
        self.refresh()
        trace += allocations_within(entries, self._ranges)

    def poison(self) -> int:
        torch.cuda.synchronize(self._device)
        free = [block for state, block in self._blocks() if state == "inactive"]
        for block in free:
            self._bytes_at(block.address, block.nbytes).fill_(0xFF)
        torch.cuda.synchronize(self._device)
        return sum(block.nbytes for block in free)

    def close(self) -> None:
        self._views.clear()
        self._ranges.clear()
        for graph in self._kept:
            with contextlib.suppress(RuntimeError):  # an invalidated capture has nothing to reset
                graph.reset()
        self._kept.clear()
        if self.mem_pool is not None:
            # A capture that CUDA invalidated never gives its reference back, and the pool aborts the process over it.
            for _ in range(self.mem_pool.use_count() - 1):
                torch._C._cuda_releasePool(self._device.index, self.id)
        self.mem_pool = None
