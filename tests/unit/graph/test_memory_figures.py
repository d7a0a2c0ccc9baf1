"""What a plan says it needs, against allocations counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from breakgraph.graph import PlanFamily, eager_on_graph

UNIT = 4 << 20
"""Bytes of one tensor: large enough that no allocator rounds it."""
COUNT = UNIT // 4


@eager_on_graph
def halve(x: Tensor) -> Tensor:
    scratch = [torch.empty_like(x) for _ in range(5)]  # a break's own memory is not the pool's
    return x / 2 + 0 * len(scratch)


@eager_on_graph(mutates=("out",))
def halve_into(x: Tensor, out: Tensor) -> Tensor:
    return torch.div(x, 2, out=out)


def three_at_once(x: Tensor) -> Tensor:
    a = x + 1
    b = a * 2
    c = a + b
    del a, b
    return c + 1


def freed_in_time(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x + 1
    return x


def across_a_break(x: Tensor) -> Tensor:
    a, b = x + 1, x + 2
    c = halve(a)  # its boundary, while both are alive
    d = c + b
    del a, b, c
    return d + 1


def written_in_place(x: Tensor) -> Tensor:
    a = x + 1
    b = halve_into(a, torch.empty_like(a))
    del a
    return b + 1


def after_the_break(x: Tensor) -> Tensor:
    a = halve(x + 1)
    return a + 1 + (a * 2 + a * 3)


@pytest.mark.parametrize(
    ("fn", "most", "boundaries"),
    [
        (three_at_once, 3, 0),
        (freed_in_time, 2, 0),
        (across_a_break, 4, 1),
        (written_in_place, 2, 0),
        (after_the_break, 5, 1),
    ],
)
def test_the_peak_of_a_plan(
    family: PlanFamily, device: torch.device, fn: Callable[[Tensor], Tensor], most: int, boundaries: int
) -> None:
    x = torch.zeros(COUNT, device=device)
    with torch.no_grad():
        report = family.capture(lambda: fn(x)).explain()
    assert report.pool_peak_bytes == most * UNIT
    assert report.boundary_bytes == boundaries * UNIT == report.to_dict()["boundary_bytes"]
    assert report.output_bytes == UNIT
    assert report.pool_peak_bytes <= report.pool_growth_bytes == family.pool_bytes
    assert f"activations {most * 4:.2f} MiB" in str(report)


def test_each_plan_of_a_pool_has_a_peak_of_its_own(family: PlanFamily, device: torch.device) -> None:
    x = torch.zeros(COUNT, device=device)
    with torch.no_grad():
        reports = [
            family.capture(lambda n=n: three_at_once(x[: COUNT // n])).explain()  # type: ignore[misc]
            for n in (1, 2, 4, 1)
        ]
    assert [report.pool_peak_bytes for report in reports] == [3 * UNIT, 3 * UNIT // 2, 3 * UNIT // 4, 3 * UNIT]
    assert reports[-1].pool_growth_bytes == 0


def test_what_the_device_does_not_measure_is_none(device: torch.device) -> None:
    with PlanFamily(device) as family, torch.no_grad():
        measuring = family.device
        report = family.capture(lambda: torch.zeros(4, device=device) + 1).explain()
        ran: list[bool] = []
        peak = measuring.peak_of(lambda: ran.append(True))
    assert ran == [True]
    assert (peak.allocated_bytes is None) == (peak.reserved_bytes is None) == measuring.emulated
    assert (report.driver_bytes is None) == (measuring.driver_bytes() is None) == measuring.emulated


def test_a_reserved_output_buffer_is_used_and_never_shrinks(family: PlanFamily, device: torch.device) -> None:
    x = torch.arange(1024.0, device=device)
    family.reserve(output_bytes=8192)
    with torch.no_grad():
        plan = family.capture(lambda: x + 1)
        assert family.output_bytes == 8192
        family.reserve(output_bytes=512)
        assert family.output_bytes == 8192
        assert torch.equal(plan.replay(), x + 1)
