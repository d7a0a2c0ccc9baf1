"""No capture: a replay is the plain call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from breakgraph.backends.base import Backend, Tree, already_captured, not_captured

if TYPE_CHECKING:
    from torch import Tensor

    from breakgraph.graph import OnHazard, OutputPolicy, PlanFamily, PlanReport, ShapeKey


class EagerBackend(Backend):
    """Keeps the forwards and calls them. Outputs are fresh tensors."""

    name = "eager"
    captures = False
    records_breaks = False

    def __init__(self, family: PlanFamily) -> None:
        super().__init__(family)
        self._forwards: dict[ShapeKey, Callable[[], Tree]] = {}

    def capture(
        self,
        key: ShapeKey,
        forward: Callable[[], Tree],
        state: Sequence[Tensor] = (),
        outputs: OutputPolicy = "borrow",
        on_hazard: OnHazard | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        if key in self._forwards:
            raise already_captured(self.name, key)
        self._forwards[key] = forward

    def replay(self, key: ShapeKey) -> Tree:
        forward = self._forwards.get(key)
        if forward is None:
            raise not_captured(self.name, key, self._forwards)
        return forward()

    def captured(self, key: ShapeKey) -> bool:
        return key in self._forwards

    def explain(self) -> dict[ShapeKey, PlanReport]:
        return {}

    def release(self, key: ShapeKey) -> None:
        self._forwards.pop(key, None)

    def close(self) -> None:
        self._forwards.clear()
