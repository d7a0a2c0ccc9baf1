"""Each plan as a full graph or with breaks, whichever a runner found faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from breakgraph.backends.base import PlanBackend, Tree, already_captured
from breakgraph.backends.breakable import BreakableBackend
from breakgraph.backends.full import FullBackend

if TYPE_CHECKING:
    from torch import Tensor

    from breakgraph.graph import OnHazard, OutputPolicy, PlanFamily, PlanReport, ShapeKey


@dataclass(frozen=True)
class Choice:
    """How one bucket is captured."""

    backend: str
    reason: str = ""
    """Why, where nothing was timed, or where the faster one was not taken."""
    step_sec: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step, metadata included, by backend."""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in self.step_sec.items())
        return f"backend auto: {self.backend}" + "".join(f" ({part})" for part in (times, self.reason) if part)


class AutoBackend(PlanBackend):
    """Captures what was chosen for a key; with breaks where nothing was. The runner chooses, see runners/auto.py."""

    name = "auto"
    records_breaks = False
    chooses = True

    def __init__(self, family: PlanFamily) -> None:
        super().__init__(family)
        self._choices: dict[ShapeKey, Choice] = {}

    def choose(self, key: ShapeKey, choice: Choice) -> None:
        """For the next capture under ``key``."""
        self._choices[key] = choice

    def forget(self, key: ShapeKey) -> None:
        """Nothing is chosen for ``key``."""
        self._choices.pop(key, None)

    def has_choice(self, key: ShapeKey) -> bool:
        """Whether :meth:`choose` was called for ``key``, or it was captured without."""
        return key in self._choices

    def has_breaks(self, key: ShapeKey) -> bool:
        return key not in self._choices or self._choices[key].backend != FullBackend.name

    def capture(
        self,
        key: ShapeKey,
        forward: Callable[[], Tree],
        state: Sequence[Tensor] = (),
        outputs: OutputPolicy = "borrow",
        on_hazard: OnHazard | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        if self.captured(key):
            raise already_captured(self.name, key)
        self._choices.setdefault(key, Choice(BreakableBackend.name, "nothing was chosen"))
        super().capture(key, forward, state, outputs, on_hazard, version)

    def explain(self) -> dict[ShapeKey, PlanReport]:
        return {
            key: replace(report, notes=(*report.notes, str(self._choices[key])))
            for key, report in super().explain().items()
        }
