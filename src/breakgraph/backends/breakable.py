"""Segments between eager breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from breakgraph.backends.base import PlanBackend, Tree
from breakgraph.graph import EagerBreak

if TYPE_CHECKING:
    from torch import Tensor

    from breakgraph.graph import OnHazard, OutputPolicy, ShapeKey


class BreakableBackend(PlanBackend):
    """Marked calls run as Python on every replay; the rest is recorded."""

    name = "breakable"
    records_breaks = False


class DebugEagerBackend(BreakableBackend):
    """The whole forward is one break: same buffers, padding and replay path, but nothing of it is recorded.

    A fault that stays with this backend is not a fault of the capture.
    """

    name = "debug_eager"

    def capture(
        self,
        key: ShapeKey,
        forward: Callable[[], Tree],
        state: Sequence[Tensor] = (),
        outputs: OutputPolicy = "borrow",
        on_hazard: OnHazard | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        super().capture(key, EagerBreak(forward, name="the whole forward"), state, outputs, on_hazard, version)
