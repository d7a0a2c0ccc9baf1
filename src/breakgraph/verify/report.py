"""What a verification found, for people and for JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from breakgraph.verify.compare import Difference

WIDTH = 80
NOTABLE_ROUNDING = 0.1
"""Padding changes rounding; a difference of this share of the largest value is worth a look."""


class Verdict(Enum):
    """What one step showed."""

    EQUAL = "equal"
    """Replay and eager on the same padded inputs agree bit by bit."""
    WITHIN_SPREAD = "within_spread"
    """Eager runs differ from each other, and the replay is as near to them as they are."""
    DIFFERENT = "different"
    """The replay gives something else than eager."""
    PADDING = "padding"
    """Eager gives something else once the rows past the live ones hold NaN."""
    REFUSED = "refused"
    """The replay raised."""


_GOOD = (Verdict.EQUAL, Verdict.WITHIN_SPREAD)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, run in every arm.

    Attributes:
        step: What was run, in words.
        differences: The tensors that differ, where the verdict is a bad one.
        rounding: The largest difference between raw eager and padded eager, over the largest value; None without
            padding.
        spread: The largest difference between eager runs; None when they agree bit by bit.
        error: What the replay raised.
    """

    step: str
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    rounding: float | None = None
    spread: float | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict in _GOOD

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "step": self.step,
            "verdict": self.verdict.value,
            "differences": [difference.to_dict() for difference in self.differences],
            "rounding": self.rounding,
            "spread": self.spread,
            "error": self.error,
        }


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Where a replay begins to differ.

    Attributes:
        segment: Number of the segment, from 0; None when it is a break.
        break_name: The break before which the segment ends, or the break itself; None for the last segment.
        op: The first operator that gives something else.
        module: Path of the module that called it.
        source: File and line that called it.
        hint: What that usually means, and what to do.
    """

    segment: int | None
    break_name: str | None
    op: str | None = None
    module: str | None = None
    source: str | None = None
    hint: str = ""

    def __str__(self) -> str:
        if self.segment is None:
            lines = [f"first wrong in: break {self.break_name}"]
        else:
            end = f"before break {self.break_name}" if self.break_name else "the last one"
            lines = [f"first wrong in: segment {self.segment}, {end}"]
        more = {"op": self.op, "module": self.module, "line": self.source, "hint": self.hint}
        lines += [f"{name}: {value}" for name, value in more.items() if value]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """One plan: every step that was tried, and where the first wrong one goes wrong."""

    subject: str
    steps: tuple[StepReport, ...]
    culprit: Culprit | None = None

    @property
    def ok(self) -> bool:
        """Whether every step was right."""
        return all(step.ok for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "subject": self.subject,
            "ok": self.ok,
            "steps": [step.to_dict() for step in self.steps],
            "culprit": None if self.culprit is None else asdict(self.culprit),
        }

    def __str__(self) -> str:
        """At most 80 columns wide; of the wrong steps, the first in full."""
        if not self.steps:
            return f"{self.subject}: not tried, the free KV blocks hold no step of this size"
        counts = Counter(step.verdict.value.replace("_", " ") for step in self.steps)
        lines = [f"{self.subject}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counts.items()))}"]
        roundings = [step.rounding for step in self.steps if step.rounding is not None]
        if roundings:
            lines.append(f"  padding changes the raw result by {max(roundings):.2g} of its largest value (rounding)")
            if max(roundings) > NOTABLE_ROUNDING:
                lines.append("  that is more than rounding usually is: check what padding rows do to live ones")
        spreads = [step.spread for step in self.steps if step.spread is not None]
        if spreads:
            lines.append(f"  eager runs differ among themselves, by {max(spreads):.3g} at most: kernels that add in")
            lines.append("  any order, random numbers of their own, or state that was not declared")
        wrong = [step for step in self.steps if not step.ok]
        if wrong:
            lines.append(f"  wrong with {wrong[0].step}")
            lines += [f"  {difference}" for difference in wrong[0].differences[:4]]
            if wrong[0].error:
                lines.append(f"  {wrong[0].error}")
            if wrong[0].verdict is Verdict.PADDING:
                lines.append("  rows past the live ones reach live results: mask them, or define them in the break")
            if self.culprit is not None:
                lines += [f"  {line}" for line in str(self.culprit).splitlines()]
        return "\n".join(part for line in lines for part in _wrap(line))


@dataclass(frozen=True, kw_only=True)
class VerifySummary:
    """Several plans, and what verifying them cost.

    Attributes:
        seconds: Wall clock, bisection included.
        snapshot_bytes: Most bytes of results and KV that were kept for comparing at the same time.
        peak_bytes: What the device had allocated at its most beyond what was there before; None where not measured.
    """

    reports: tuple[VerifyReport, ...]
    seconds: float
    snapshot_bytes: int
    peak_bytes: int | None = None
    num_steps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_steps", sum(len(report.steps) for report in self.reports))

    @property
    def ok(self) -> bool:
        """Whether every plan was right."""
        return all(report.ok for report in self.reports)

    @property
    def wrong(self) -> Sequence[VerifyReport]:
        """The plans that were not."""
        return [report for report in self.reports if not report.ok]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, units in the names."""
        return {**self.cost(), "plans": [report.to_dict() for report in self.reports]}

    def cost(self) -> dict[str, Any]:
        """Totals, JSON-able."""
        return {
            "ok": self.ok,
            "num_plans": len(self.reports),
            "num_wrong_plans": len(self.wrong),
            "num_untried_plans": sum(not report.steps for report in self.reports),
            "num_steps": self.num_steps,
            "verify_sec": self.seconds,
            "snapshot_bytes": self.snapshot_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def line(self) -> str:
        """All of it in one line."""
        verdict = "all equal to eager" if self.ok else f"{len(self.wrong)} WRONG"
        untried = [report.subject for report in self.reports if not report.steps]
        if untried:
            verdict += f" but {', '.join(untried)}, for which there were too few KV blocks"
        peak = "" if self.peak_bytes is None else f", {self.peak_bytes / 2**20:.1f} MiB at the peak"
        return (
            f"verified {len(self.reports)} plans in {self.num_steps} steps, {verdict}: {self.seconds:.2f} s, "
            f"{self.snapshot_bytes / 2**20:.1f} MiB kept for comparing{peak}"
        )


def _wrap(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, WIDTH, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [line]
