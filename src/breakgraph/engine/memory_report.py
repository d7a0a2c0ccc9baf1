"""The memory report of an engine: what each bucket needs, what there is of it, and what is not needed any more."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from breakgraph.engine.device_memory import MemoryPlan

if TYPE_CHECKING:
    from breakgraph.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class BucketMemory:
    """One captured bucket, in bytes: see :class:`breakgraph.graph.PlanReport`, whose figures these are.

    Attributes:
        activation_bytes: Most bytes of the pool in use at the same time, boundaries included.
        boundary_bytes: Results of breaks, summed; they share memory where they can.
        output_bytes: In the shared output buffer.
        pool_growth_bytes: What the pool grew by for this bucket.
        driver_bytes: What the driver took; None is not measured.
    """

    phase: str
    bucket: int
    activation_bytes: int
    boundary_bytes: int
    output_bytes: int
    pool_growth_bytes: int
    driver_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What an engine holds, in bytes.

    Attributes:
        emulated: True on the CPU device: sizes are those of the emulation, driver and peaks are not measured.
        buckets: Largest of each phase first.
        pool_bytes: Shared by all buckets.
        output_bytes: Buffer shared by all buckets.
        input_bytes: Static buffers of the runners.
        driver_bytes: What the driver took for the buckets that are captured; None is not measured.
        kv_cache_bytes: The KV cache.
        weight_bytes: The model's parameters and buffers.
        estimate: What the KV cache was sized with.
    """

    emulated: bool
    buckets: tuple[BucketMemory, ...]
    pool_bytes: int
    output_bytes: int
    input_bytes: int
    driver_bytes: int | None
    kv_cache_bytes: int
    weight_bytes: int
    estimate: MemoryPlan

    @property
    def graph_bytes(self) -> int:
        """All that the graphs take, as far as it is measured."""
        return self.pool_bytes + self.output_bytes + self.input_bytes + (self.driver_bytes or 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, units in the names; None is not measured."""
        return {
            "emulated": self.emulated,
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "pool_bytes": self.pool_bytes,
            "output_bytes": self.output_bytes,
            "input_bytes": self.input_bytes,
            "driver_bytes": self.driver_bytes,
            "graph_bytes": self.graph_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "weight_bytes": self.weight_bytes,
            "estimate": self.estimate.to_dict(),
        }


def memory_report(engine: Engine) -> MemoryReport:
    """The report of an open engine; before `capture` it has no buckets."""
    assert engine.kv is not None, "an open engine has a KV cache"
    buckets = tuple(
        BucketMemory(
            phase=key.phase,
            bucket=key.size,
            activation_bytes=report.pool_peak_bytes,
            boundary_bytes=report.boundary_bytes,
            output_bytes=report.output_bytes,
            pool_growth_bytes=report.pool_growth_bytes,
            driver_bytes=report.driver_bytes,
        )
        for key, report in engine.explain().items()
    )
    driver = [bucket.driver_bytes for bucket in buckets if bucket.driver_bytes is not None]
    return MemoryReport(
        emulated=engine.family.device.emulated,
        buckets=buckets,
        pool_bytes=engine.family.pool_bytes,
        output_bytes=engine.family.output_bytes,
        input_bytes=sum(runner.input_bytes for runner in engine.runners.values()),
        driver_bytes=sum(driver) if driver else None,
        kv_cache_bytes=engine.kv.num_bytes,
        weight_bytes=engine.facts.weight_bytes,
        estimate=engine.memory,
    )
