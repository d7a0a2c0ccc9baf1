"""What the scan before a capture reports: operations and side effects that a replay cannot repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from breakgraph.errors import HazardError

OnHazard = Literal["raise", "break", "warn"]


@dataclass(frozen=True, slots=True)
class Hazard:
    """One thing that no segment can hold, or that a replay does not repeat.

    Attributes:
        kind: "host sync", "data-dependent shape", "pageable copy", "moved storage", "unregistered generator",
            "Python side effect", "first-use state" or "side stream".
        what: The operator, call or attribute.
        why: What it does.
        module: Path of the innermost module that was running; empty outside of any.
        source: ``file:line in function`` of the user's code.
        way_out: What to do about it.
        blocks: False for what is worth knowing and does no harm.
    """

    kind: str
    what: str
    why: str
    module: str
    source: str
    way_out: str
    blocks: bool = True

    @property
    def reason(self) -> str:
        """What, why and where, in one line."""
        return f"{self.what}: it {self.why} ({self._place})"

    @property
    def _place(self) -> str:
        return f"{self.source}, module {self.module}" if self.module else self.source

    def __str__(self) -> str:
        if not self.blocks:
            return self.reason
        return f"{self.what} cannot be captured: it {self.why} ({self._place}); {self.way_out}"


@dataclass(frozen=True, slots=True)
class HazardReport:
    """Everything that one scan found, in the order in which it was met; prints one line each."""

    hazards: tuple[Hazard, ...] = ()

    @property
    def blocking(self) -> tuple[Hazard, ...]:
        """Those that make a capture fail or a replay wrong."""
        return tuple(hazard for hazard in self.hazards if hazard.blocks)

    @property
    def notes(self) -> tuple[Hazard, ...]:
        """Those that do no harm."""
        return tuple(hazard for hazard in self.hazards if not hazard.blocks)

    def error(self, obstacles: Sequence[str] = ()) -> HazardError:
        """All blocking hazards in one exception.

        Args:
            obstacles: Why no break could be made around them, where that was asked for.
        """
        lines = [str(hazard) for hazard in self.blocking]
        if len(lines) > 1:
            lines = [f"{len(lines)} hazards:", *(f"  {line}" for line in lines)]
        return HazardError("\n".join([*lines, *(f"no break was made: {text}" for text in obstacles)]), self)

    def __str__(self) -> str:
        return "\n".join(str(hazard) for hazard in self.hazards) or "no hazards"
