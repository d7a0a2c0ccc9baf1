"""The emulated pool: reuses freed blocks as a caching allocator does, and knows which bytes this replay has written."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from breakgraph.errors import UnwrittenReadError
from breakgraph.graph.device import Block, Pool
from breakgraph.graph.packing import SMALL_BYTES, segment_bytes
from breakgraph.graph.tree import is_scattered

_ALIGNMENT = 512
_SMALL_ARENA = 2 << 20


class _Arena:
    """One reservation: memory, its written map (one byte a byte). Small allocations have arenas of their own."""

    def __init__(self, nbytes: int, is_small: bool) -> None:
        self.is_small = is_small
        self.memory = bytearray(nbytes + _ALIGNMENT)
        raw = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.skip = -raw % _ALIGNMENT
        self.address = raw + self.skip
        self.nbytes = nbytes
        self.written = bytearray(nbytes)
        self.written_address = torch.frombuffer(self.written, dtype=torch.uint8).data_ptr()


class Span(NamedTuple):
    """The bytes of one tensor: a dense run, or (``rows`` not None) a strided view of the written map."""

    arena: _Arena
    start: int
    end: int
    rows: torch.Tensor | None


class CpuPool(Pool):
    """Best-fit allocation from arenas, split and merged by the rules of torch's allocator on CUDA; a block is free once
    no tensor refers to its storage.

    Owns: the arenas. Closed by: its plan family.

    Attributes:
        peak_bytes: Most bytes in use at the same time since :meth:`restart_peak`.
    """

    def __init__(self) -> None:
        self._arenas: list[_Arena] = []
        self._bases: list[int] = []
        # Of large and of small arenas: (nbytes, address), sorted: best fit first, lowest address first.
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._live: dict[int, tuple[int, StorageWeakRef]] = {}
        self._views: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._live_bytes = 0
        self._trace: list[tuple[int, int]] | None = None
        self._numbers: dict[int, int] = {}  # by address, of what the trace has seen allocated
        self.peak_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def _arena(self, address: int) -> _Arena | None:
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        arena = self._arenas[index]
        return arena if address < arena.address + arena.nbytes else None

    def refresh(self) -> None:
        """Every reservation is known here."""

    def owns(self, address: int) -> bool:
        return self._arena(address) is not None

    def place_of(self, address: int) -> str | None:
        """Where an address of this pool lies, in words that are equal for pools that were used alike."""
        arena = self._arena(address)
        return None if arena is None else f"arena {self._arenas.index(arena)}+{address - arena.address}"

    def live_blocks(self) -> list[Block]:
        self._sweep()
        return [Block(address, nbytes) for address, (nbytes, _) in sorted(self._live.items())]

    def restart_peak(self) -> int:
        """Count :attr:`peak_bytes` from now on; returns the bytes in use now."""
        self._sweep()
        self.peak_bytes = self._live_bytes
        return self._live_bytes

    def empty_strided(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """An uninitialised pool tensor whose storage has at least ``nbytes`` bytes."""
        storage = self._allocate(max(nbytes, 1))
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def view_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._views:
            self._views[key] = self._storage_at(*key)
        return self._views[key]

    def _storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        arena = self._arena(address)
        assert arena is not None, f"address {address:#x} is not in this pool"
        offset = address - arena.address + arena.skip
        return torch.frombuffer(arena.memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()

    def _allocate(self, nbytes: int) -> torch.UntypedStorage:
        self._sweep()
        need = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        is_small = need <= SMALL_BYTES
        free = self._free[is_small]
        fit = bisect_right(free, (need, -1))
        if fit == len(free):
            self._grow(need, is_small)
            fit = bisect_right(free, (need, -1))
        have, address = free.pop(fit)
        if have - need > (0 if is_small else SMALL_BYTES):
            insort(free, (have - need, address + need))
        else:
            need = have
        storage = self._storage_at(address, nbytes)
        self._live[address] = (need, StorageWeakRef(storage))
        self._live_bytes += need
        if self._trace is not None:
            self._numbers[address] = len(self._trace)
            self._trace.append((len(self._trace), need))
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return storage

    def _grow(self, need: int, is_small: bool) -> None:
        arena = _Arena(_SMALL_ARENA if is_small else segment_bytes(need), is_small)
        index = bisect_right(self._bases, arena.address)
        self._bases.insert(index, arena.address)
        self._arenas.insert(index, arena)
        insort(self._free[is_small], (arena.nbytes, arena.address))

    def _sweep(self) -> None:
        dead = [address for address, (_, ref) in self._live.items() if ref.expired()]
        if not dead:
            return
        for address in dead:
            nbytes, _ = self._live.pop(address)
            self._live_bytes -= nbytes
            if self._trace is not None and address in self._numbers:
                self._trace.append((self._numbers.pop(address), nbytes))
            arena = self._arena(address)
            assert arena is not None, f"address {address:#x} is not in this pool"
            self._free[arena.is_small].append((nbytes, address))
        for free in self._free:
            self._merge(free)

    def _merge(self, free: list[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for nbytes, address in sorted(free, key=lambda run: run[1]):
            if merged and sum(merged[-1]) == address and self._arena(merged[-1][1]) is self._arena(address):
                merged[-1] = (merged[-1][0] + nbytes, merged[-1][1])
            else:
                merged.append((nbytes, address))
        free[:] = sorted(merged)

    def span(self, tensor: torch.Tensor) -> Span | None:
        """The pool bytes of ``tensor``; None when it lies elsewhere, in several pieces, or is empty."""
        if is_scattered(tensor) or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        arena = self._arena(address)
        if arena is None:
            return None
        start, item = address - arena.address, tensor.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        is_run = extent == tensor.numel() and _is_dense(tensor)
        return Span(arena, start, start + extent * item, None if is_run else _marks(arena, tensor))

    @staticmethod
    def mark_written(span: Span, written: int = 1) -> None:
        """Note that every byte of ``span`` was written in this replay (1), or holds nothing of it (0)."""
        if span.rows is not None:
            span.rows.fill_(written)
        else:
            ctypes.memset(span.arena.written_address + span.start, written, span.end - span.start)

    @staticmethod
    def is_written(span: Span) -> bool:
        """Whether every byte of ``span`` was written in this replay."""
        if span.rows is not None:
            return bool(span.rows.all())
        return span.arena.written.find(0, span.start, span.end) < 0

    def move_marks(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """After a copy: an element of ``target`` counts as written where that of ``source``, of its shape, does. Both
        lie in the pool."""
        arenas = [self._arena(tensor.data_ptr()) for tensor in (target, source)]
        assert None not in arenas, "only marks of this pool can be moved"
        marks, given = (_marks(arena, tensor) for arena, tensor in zip(arenas, (target, source), strict=True) if arena)
        marks.copy_(given.amin(-1, keepdim=True).expand(marks.shape))

    def check_written(self, span: Span, reader: object) -> None:
        """Raises UnwrittenReadError when ``reader`` would see bytes that this replay has not written."""
        if not self.is_written(span):
            raise UnwrittenReadError(
                f"{reader} reads pool bytes {span.start}..{span.end} that this replay has not written: on a GPU they "
                "hold whatever another plan left there; write the whole tensor before it is read"
            )

    def begin_replay(self) -> None:
        """Forget what earlier replays wrote."""
        for arena in self._arenas:
            ctypes.memset(arena.written_address, 0, arena.nbytes)

    def reserve(self, runs: Sequence[int]) -> None:
        held = [self._allocate(run) for run in sorted(runs, reverse=True) if run]
        del held  # free again, and kept by the pool

    @contextmanager
    def tracing(self) -> Iterator[list[tuple[int, int]]]:
        self._sweep()
        trace: list[tuple[int, int]] = []
        self._trace = trace
        self._numbers.clear()
        try:
            yield trace
            self._sweep()
        finally:
            self._trace = None

    def poison(self) -> int:
        self._sweep()
        runs = [run for free in self._free for run in free]
        for nbytes, address in runs:
            ctypes.memset(address, 0xFF, nbytes)
        return sum(nbytes for nbytes, _ in runs)

    def close(self) -> None:
        self._arenas.clear()
        self._bases.clear()
        self._free = ([], [])
        self._live.clear()
        self._live_bytes = 0
        self._views.clear()


def _marks(arena: _Arena, tensor: torch.Tensor) -> torch.Tensor:
    """The written map of a tensor's bytes, [*shape, bytes of an element]."""
    item = tensor.element_size()
    size, stride = (*tensor.shape, item), (*(s * item for s in tensor.stride()), 1)
    written = torch.frombuffer(arena.written, dtype=torch.uint8)
    return written.as_strided(size, stride, tensor.data_ptr() - arena.address)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements cover their extent without gap or overlap, in any dimension order."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
