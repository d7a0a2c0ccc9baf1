"""Each plan as a full graph or with breaks, whichever a runner found faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from breakgraph.backends.base import PlanBackend
from breakgraph.backends.breakable import BreakableBackend
from breakgraph.backends.full import FullBackend

if TYPE_CHECKING:
    from breakgraph.graph import PlanFamily, PlanReport, ShapeKey


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

    def choose(
        self, key: ShapeKey, backend: str, reason: str = "", step_sec: Mapping[str, float] | None = None
    ) -> None:  # fmt: skip
        """For the next capture under ``key``; see :class:`Choice`."""
        self._choices[key] = Choice(backend, reason, step_sec or {})

    def forget(self, key: ShapeKey) -> None:
        """Nothing is chosen for ``key``."""
        self._choices.pop(key, None)

    def has_choice(self, key: ShapeKey) -> bool:
        """Whether :meth:`choose` was called for ``key``, or it was captured without."""
        return key in self._choices or self.captured(key)

    def was_timed(self, key: ShapeKey) -> bool:
        """Whether the choice was made from times of its own."""
        return key in self._choices and bool(self._choices[key].step_sec)

    def has_breaks(self, key: ShapeKey) -> bool:
        return key not in self._choices or self._choices[key].backend != FullBackend.name

    def explain(self) -> dict[ShapeKey, PlanReport]:
        unasked = Choice(BreakableBackend.name, "nothing was chosen")
        return {
            key: replace(report, notes=(*report.notes, str(self._choices.get(key, unasked))))
            for key, report in super().explain().items()
        }
