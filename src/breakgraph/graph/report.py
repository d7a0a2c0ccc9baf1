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
        reason: Why the break was made, where ``on_hazard="break"`` made it; empty for marked calls.
        host_sec: Time the host takes to launch the segment, or to run the break, in seconds: the median of three early
            replays. None before them, and for a segment that is not launched. On the CPU device, and where a break
            waits for the device, the work itself is in it.
    """

    kind: str
    name: str
    num_ops: int = 0
    num_nodes: int = 0
    arguments: int = 0
    boundary_bytes: int = 0
    side_streams: int = 0
    reason: str = ""
    host_sec: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCost:
    """What one capture took: the fields of the same names of :class:`PlanReport`."""

    pool_peak_bytes: int
    pool_growth_bytes: int
    driver_bytes: int | None
    capture_sec: float
    compile_sec: float


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
        pool_peak_bytes: Most bytes of the family's pool that the plan has in use at the same time: its activations, the
            boundaries included, sizes rounded up as the allocator rounds. Plans share the pool, so it holds the largest
            of these figures, not their sum.
        pool_growth_bytes: Bytes this capture added to the family's pool.
        driver_bytes: Device memory that the capture took and torch's allocator does not hold: what the driver keeps for
            the graphs. None on the CPU device. The driver hands out megabytes at a time, and other processes count:
            only sums over many plans mean something.
        capture_sec: Wall-clock time of the capture, warm-up and compiling included.
        compile_sec: The part of it in which the function was traced and compiled; 0 where the backend does neither.
        replays: Replays so far.
        notes: What the scan for hazards saw and let pass; and why a backend was chosen, where one was.
    """

    label: str
    device: str
    emulated: bool
    steps: tuple[StepReport, ...]
    output_bytes: int
    pinned_bytes: int
    pool_peak_bytes: int
    pool_growth_bytes: int
    driver_bytes: int | None
    capture_sec: float
    compile_sec: float
    replays: int
    notes: tuple[str, ...] = ()

    @property
    def num_segments(self) -> int:
        """Captured graphs."""
        return sum(step.kind == "segment" for step in self.steps)

    @property
    def num_breaks(self) -> int:
        """Eager breaks."""
        return sum(step.kind == "break" for step in self.steps)

    @property
    def boundary_bytes(self) -> int:
        """Bytes copied at every replay to hand the results of breaks on; the buffers lie in the pool."""
        return sum(step.boundary_bytes for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        counts = {"num_segments": self.num_segments, "num_breaks": self.num_breaks}
        return {**asdict(self), **counts, "boundary_bytes": self.boundary_bytes}

    def __str__(self) -> str:
        nodes = sum(step.num_nodes for step in self.steps)
        lines = [
            f"{self.label or 'plan'} on {self.device}{' (emulated)' if self.emulated else ''}: "
            f"{self.num_segments} segments, {self.num_breaks} breaks, {nodes} nodes, {self.replays} replays",
            f"  activations {self.pool_peak_bytes / MIB:.2f} MiB, pool +{self.pool_growth_bytes / MIB:.2f} MiB, "
            f"outputs {self.output_bytes / MIB:.2f} MiB, pinned {self.pinned_bytes / MIB:.2f} MiB, captured in "
            f"{self.capture_sec:.3f} s" + (f", {self.compile_sec:.3f} s of it compiled" if self.compile_sec else ""),
        ]
        for step in self.steps:
            host = "" if step.host_sec is None or self.emulated else f", host {step.host_sec * 1e6:.1f} us"
            if step.kind == "segment":
                note = "" if step.num_nodes else " (empty: not launched)"
                lines.append(f"  segment {step.name}: {step.num_ops} ops, {step.num_nodes} nodes{note}{host}")
            else:
                copied = f"copies {step.boundary_bytes} bytes" if step.boundary_bytes else "copies nothing"
                joined = f", joins {step.side_streams} streams" if step.side_streams else ""
                lines.append(f"  break {step.name}: {step.arguments} tensors in, {copied}{joined}{host}")
                if step.reason:
                    lines.append(f"    made because {step.reason}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
