"""How to cut a pool so that little of it lies idle.

A caching allocator gives each tensor the smallest free run that fits, and splits what is left over. With one run of
memory a tensor that stays sits down in the middle of what later ones need in one piece; the pool then grows beyond what
is ever in use, by half for some mixtures of experts. With the right few runs hardly anything is lost. Which they are
is found by playing the allocations of a capture back on paper.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Of torch's allocator on CUDA (c10/cuda/CUDACachingAllocator.cpp). Smaller allocations live in segments of their own.
SMALL_BYTES = 1 << 20
_ROUND_BYTES = 512
_SEGMENT_BYTES = 2 << 20
_LEAST_SEGMENT_BYTES = 20 << 20
_ROUNDED_FROM_BYTES = 10 << 20

_NUM_CANDIDATES = 3000
_MAX_RUNS, _MAX_SUMMANDS = 3, 8
_NUM_LAYOUTS = 8
_MAX_EVENTS = 1600
"""Layers repeat: this many show them all."""
_WORTHWHILE_BYTES = 32 << 20


@dataclass(frozen=True)
class AllocationTrace:
    """What a capture allocated from its pool and gave back, in order.

    Attributes:
        events: (number of the allocation, bytes): its first occurrence takes them, its second gives them back.
    """

    events: tuple[tuple[int, int], ...]

    def scaled(self, ratio: float) -> AllocationTrace:
        """That of a bucket of another size: activations grow with it."""
        return AllocationTrace(
            tuple((number, _rounded(int(size * ratio), _ROUND_BYTES)) for number, size in self.events)
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at the same time, small allocations left out."""
        live: set[int] = set()
        in_use = peak = 0
        for number, size in self.events:
            if size > SMALL_BYTES:
                in_use += -size if number in live else size
                live ^= {number}
                peak = max(peak, in_use)
        return peak

    def shortened(self) -> AllocationTrace:
        """Its beginning and its end, if it is long; what lives across the cut is left out."""
        if len(self.events) <= _MAX_EVENTS:
            return self
        kept = [*self.events[: _MAX_EVENTS * 3 // 4], *self.events[-(_MAX_EVENTS // 4) :]]
        times: dict[int, int] = {}
        for number, _ in kept:
            times[number] = times.get(number, 0) + 1
        return AllocationTrace(tuple(event for event in kept if times[event[0]] == 2))


class _Pool:
    """Free runs, smallest first, of equals the one that comes first in memory.

    Where the driver puts a segment nobody knows before, and two free runs of one size are common: ``layout`` is one of
    the ways it may be, drawn at random.
    """

    def __init__(self, runs: Iterable[int], layout: int) -> None:
        self.nbytes = 0
        self._rng = random.Random(layout)
        self._free: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for run in runs:
            self._add(run)

    def play(self, trace: AllocationTrace, limit: float) -> bool:
        """Whether the pool stays within ``limit`` bytes; what it has grown by remains."""
        live: dict[int, tuple[int, int]] = {}
        for number, size in trace.events:
            if size <= SMALL_BYTES:
                continue
            if number in live:
                self._put(*live.pop(number))
                continue
            index = bisect_left(self._free, (size, -1))
            if index == len(self._free):
                self._add(segment_bytes(size))
                if self.nbytes > limit:
                    return False
                index = bisect_left(self._free, (size, -1))
            live[number] = self._take(index, size)
        for block in live.values():
            self._put(*block)
        return True

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        # Segments never touch: an address in a terabyte of its own.
        self._insert(self._rng.randrange(1 << 40) << 40, nbytes)

    def _insert(self, address: int, nbytes: int) -> None:
        insort(self._free, (nbytes, address))
        self._starts[address] = self._ends[address + nbytes] = nbytes

    def _remove(self, address: int, nbytes: int) -> None:
        del self._free[bisect_left(self._free, (nbytes, address))]
        del self._starts[address], self._ends[address + nbytes]

    def _take(self, index: int, size: int) -> tuple[int, int]:
        nbytes, address = self._free[index]
        self._remove(address, nbytes)
        if nbytes - size <= SMALL_BYTES:
            return address, nbytes
        self._insert(address + size, nbytes - size)
        return address, size

    def _put(self, address: int, nbytes: int) -> None:
        after = self._starts.get(address + nbytes)
        if after is not None:
            self._remove(address + nbytes, after)
            nbytes += after
        before = self._ends.get(address)
        if before is not None:
            self._remove(address - before, before)
            address, nbytes = address - before, nbytes + before
        self._insert(address, nbytes)


def segment_bytes(size: int) -> int:
    """What torch takes from the driver for an allocation that fits nowhere."""
    return _LEAST_SEGMENT_BYTES if size < _ROUNDED_FROM_BYTES else _rounded(size, _SEGMENT_BYTES)


def pool_bytes(runs: Sequence[int], traces: Sequence[AllocationTrace], limit: float = float("inf")) -> float:
    """What a pool that is cut into ``runs`` holds once captures with these traces went through it, one by one.

    The most of several ways in which the driver may lay its segments out. Infinite when that is more than ``limit``.
    Small allocations don't count.
    """
    most = 0
    for layout in range(_NUM_LAYOUTS):
        pool = _Pool(runs, layout)
        if pool.nbytes > limit or not all(pool.play(trace, limit) for trace in traces):
            return float("inf")
        most = max(most, pool.nbytes)
    return most


def choose_runs(traces: Sequence[AllocationTrace]) -> tuple[int, ...]:
    """Sizes in bytes of the runs to reserve, before captures with these traces, for the smallest pool that was found.

    One run where cutting it would gain little; none where there are small allocations only, which never come from it.
    The same traces give the same runs.

    Args:
        traces: In the order of the captures.
    """
    traces = [trace.shortened() for trace in traces]
    fewest = unreserved = pool_bytes((), traces)
    whole: tuple[int, ...] = (int(unreserved),) if unreserved else ()
    best = whole
    if unreserved - max((trace.peak_bytes for trace in traces), default=0) < _WORTHWHILE_BYTES:
        return best
    sizes = sorted({size for trace in traces[:1] for _, size in trace.events if size > SMALL_BYTES})
    rng = random.Random(0)
    for _ in range(_NUM_CANDIDATES):
        runs = tuple(
            segment_bytes(sum(rng.choices(sizes, k=rng.randint(1, _MAX_SUMMANDS))))
            for _ in range(rng.randint(1, _MAX_RUNS))
        )
        found = pool_bytes(runs, traces, limit=fewest)
        if found < fewest:
            best, fewest = runs, found
    return best if unreserved - fewest >= _WORTHWHILE_BYTES else whole


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
