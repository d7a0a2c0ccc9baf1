"""What a forward computed on its way, kept so that two runs can be compared point by point."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from breakgraph.graph import BreakWatcher
from breakgraph.graph.eager_break import BreakSpec
from breakgraph.verify.compare import digest, same_bits

_MAX_LOOKED_AT = 1 << 28
"""Bytes of one tensor; a larger one is a cache that is written in a few places."""


class ValueLog:
    """Digests of the tensors at each point of a run, by the point's number."""

    def __init__(self) -> None:
        self.points: dict[int, list[Tensor | None]] = {}

    def restart(self) -> None:
        """Forget the run so far; what was read from it stays with its reader."""
        self.points = {}

    def add(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Note what the tensors hold now."""
        self.points[index] = [None if t.nbytes > _MAX_LOOKED_AT else digest(t) for t in tensors]


def same_point(one: list[Tensor | None] | None, other: list[Tensor | None] | None) -> bool:
    """Whether two runs had the same values at a point; one that was not looked at does not differ."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(a is None or b is None or same_bits(a, b) for a, b in zip(one, other, strict=True))


class BreakLog(BreakWatcher):
    """What went into each break and came out of it.

    Attributes:
        given: Arguments that the break does not write, by the break's number.
        written: Arguments that it writes, as they were before; memory that nobody has filled may be among them.
        results: Both kinds of results, afterwards.
        names: Of the breaks, in order.
    """

    def __init__(self) -> None:
        self.given, self.written, self.results = ValueLog(), ValueLog(), ValueLog()
        self.names: list[str] = []

    def before(self, spec: BreakSpec, tensors: Sequence[Tensor], mutated: Sequence[Tensor]) -> None:
        index = len(self.names)
        self.names.append(spec.name)
        own = {id(t) for t in mutated}
        self.given.add(index, [t for t in tensors if id(t) not in own])
        self.written.add(index, mutated)

    def after(self, spec: BreakSpec, mutated: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self.results.add(len(self.names) - 1, [*mutated, *results])
