"""Segments between eager breaks."""

from __future__ import annotations

from collections.abc import Callable

from breakgraph.backends.base import PlanBackend, Tree
from breakgraph.graph import EagerBreak


class BreakableBackend(PlanBackend):
    """Marked calls run as Python on every replay; the rest is recorded."""

    name = "breakable"
    records_breaks = False


class DebugEagerBackend(BreakableBackend):
    """The whole forward is one break: same buffers, padding and replay path, but nothing of it is recorded.

    A fault that stays with this backend is not a fault of the capture.
    """

    name = "debug_eager"

    def _recorded(self, forward: Callable[[], Tree]) -> Callable[[], Tree]:
        return EagerBreak(forward, name="the whole forward")
