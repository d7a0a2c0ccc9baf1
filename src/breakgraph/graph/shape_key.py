"""The identity of a captured plan."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class ShapeKey(NamedTuple):
    """What makes two batches share one plan. A tuple, as every replay looks one up.

    Attributes:
        phase: The runner's phase, e.g. ``"prefill"``.
        size: The bucket along the phase's size axis (tokens or requests).
        extra: Every other host value that reaches a kernel, as sorted ``(name, value)`` pairs.
    """

    phase: str
    size: int
    extra: tuple[tuple[str, Hashable], ...] = ()

    def __str__(self) -> str:
        tail = "".join(f",{name}={value}" for name, value in self.extra)
        return f"{self.phase}[{self.size}{tail}]"
