"""What the steps of one phase need, as measured by its runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from breakgraph.graph import AllocationTrace, Peak

_MAX_TRACES = 10


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Bytes; a :class:`Peak` is empty, and ``driver_bytes_per_plan`` None, on a device that does not measure them.

    Attributes:
        num_plans: Buckets that will be captured.
        runs_eagerly: Whether the scheduler can send a step that no bucket holds.
        input_bytes: The static input buffers.
        eager: An eager step of the largest size, and one whose requests are as long as they can be.
        pool_bytes: Pool that the largest bucket takes when it is captured alone; 0 where nothing is captured.
        pool_peak_bytes: What it has in use at the same time of that.
        output_bytes: Outputs of the largest bucket.
        replay: The same steps as for ``eager`` replayed: what breaks take outside the pool.
        driver_bytes_per_plan: What the driver keeps for one plan, from several captures of the smallest bucket.
        traces: What the pool goes through when the largest bucket is captured, and some of the others, largest first.
    """

    phase: str
    num_plans: int
    runs_eagerly: bool
    input_bytes: int
    eager: Peak
    pool_bytes: int = 0
    pool_peak_bytes: int = 0
    output_bytes: int = 0
    replay: Peak = field(default_factory=Peak)
    driver_bytes_per_plan: int | None = None
    traces: tuple[AllocationTrace, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; None is not measured."""
        return {
            "num_plans": self.num_plans,
            "runs_eagerly": self.runs_eagerly,
            "input_bytes": self.input_bytes,
            "eager_peak_bytes": self.eager.allocated_bytes,
            "eager_reserved_bytes": self.eager.reserved_bytes,
            "largest_bucket_pool_bytes": self.pool_bytes,
            "largest_bucket_pool_peak_bytes": self.pool_peak_bytes,
            "output_bytes": self.output_bytes,
            "replay_peak_bytes": self.replay.allocated_bytes,
            "replay_reserved_bytes": self.replay.reserved_bytes,
            "driver_bytes_per_plan": self.driver_bytes_per_plan,
        }


def traces_of(events: Sequence[tuple[int, int]], ladder: Sequence[int]) -> tuple[AllocationTrace, ...]:
    """What the last bucket of a ladder allocated, and from that, scaled, what others will; largest first."""
    trace = AllocationTrace(tuple(events)).shortened()
    every = -(-len(ladder) // _MAX_TRACES)
    return tuple(trace.scaled(size / ladder[-1]) for size in ladder[::-1][::every])
