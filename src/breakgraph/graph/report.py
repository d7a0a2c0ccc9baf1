"""What ``explain()`` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StepReport:
    """One segment (``kind`` "segment") or eager break (``kind`` "break") of a plan.

    Attributes:
        kind: "segment" or "break".
        name: The segment's number, or the marked call's name.
        num_ops: Operators recorded in a segment.
        num_nodes: Graph nodes; 0 means that the segment is not launched at all.
        arguments: Number of tensors a break reads.
        boundary_bytes: Bytes copied at every replay to hand the break's result on; 0 when it writes in place.
        side_streams: Streams that are joined before and after the break.
    """

    kind: str
    name: str
    num_ops: int = 0
    num_nodes: int = 0
    arguments: int = 0
    boundary_bytes: int = 0
    side_streams: int = 0


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was captured, what broke, what it holds.

    Attributes:
        label: The plan's name.
        device: Where it runs.
        emulated: True on the CPU device, which claims no speed.
        steps: In the order of a replay.
        output_bytes: Size of the outputs in the family's shared buffer.
        pinned_bytes: Memory outside the pool that the plan keeps alive (parameters, inputs, caches).
        pool_growth_bytes: Bytes this capture added to the family's pool.
        capture_sec: Wall-clock time of the capture, warm-up included.
        replays: Replays so far.
    """

    label: str
    device: str
    emulated: bool
    steps: tuple[StepReport, ...]
    output_bytes: int
    pinned_bytes: int
    pool_growth_bytes: int
    capture_sec: float
    replays: int

    @property
    def num_segments(self) -> int:
        """Captured graphs."""
        return sum(step.kind == "segment" for step in self.steps)

    @property
    def num_breaks(self) -> int:
        """Eager breaks."""
        return sum(step.kind == "break" for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "num_segments": self.num_segments, "num_breaks": self.num_breaks}

    def __str__(self) -> str:
        nodes = sum(step.num_nodes for step in self.steps)
        lines = [
            f"{self.label or 'plan'} on {self.device}{' (emulated)' if self.emulated else ''}: "
            f"{self.num_segments} segments, {self.num_breaks} breaks, {nodes} nodes, {self.replays} replays",
            f"  pool +{self.pool_growth_bytes / MIB:.2f} MiB, outputs {self.output_bytes / MIB:.2f} MiB, "
            f"pinned {self.pinned_bytes / MIB:.2f} MiB, captured in {self.capture_sec:.3f} s",
        ]
        for step in self.steps:
            if step.kind == "segment":
                note = "" if step.num_nodes else " (empty: not launched)"
                lines.append(f"  segment {step.name}: {step.num_ops} ops, {step.num_nodes} nodes{note}")
            else:
                copied = f"copies {step.boundary_bytes} bytes" if step.boundary_bytes else "copies nothing"
                joined = f", joins {step.side_streams} streams" if step.side_streams else ""
                lines.append(f"  break {step.name}: {step.arguments} tensors in, {copied}{joined}")
        return "\n".join(lines)
