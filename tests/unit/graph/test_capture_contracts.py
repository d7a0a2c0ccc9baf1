"""Captures and modes: corners that mutating the library showed no other test to hold."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from breakgraph.errors import (
    CaptureError,
    CaptureUnavailableError,
    ConfigError,
    StaleOutputError,
)
from breakgraph.graph import Plan, PlanFamily, eager_on_graph

Replay = Callable[[Plan], Tensor]


@eager_on_graph
def double(t: Tensor) -> Tensor:
    return t * 2


# Captures.


def test_the_capture_runs_on_the_data_of_the_first_call(device: torch.device, family: PlanFamily) -> None:
    count, seen = torch.zeros(1, device=device), []

    @eager_on_graph
    def look(t: Tensor) -> Tensor:
        seen.append((t.item(), torch.rand(1).item()))
        return t.clone()

    with torch.no_grad():
        family.capture(lambda: look(count.add_(1)) * 1, state=(count,))
    assert seen[0] == seen[1]
    assert seen[0][0] == 1


def test_warm_ups_are_counted(device: torch.device, family: PlanFamily) -> None:
    x, runs = torch.randn(4, device=device), []

    def fn() -> Tensor:
        runs.append(1)
        return x + 1

    with torch.no_grad():
        family.capture(fn, warmup=3)
        assert len(runs) == 4
        with pytest.raises(ConfigError, match="warmup >= 1"):
            family.capture(fn, warmup=0)


@pytest.mark.parametrize(
    "change", [lambda y: y.double(), lambda y: None, lambda y: 1.0, lambda y: y[:2], lambda y: y[None]]
)
def test_outputs_of_the_capture_are_those_of_the_warm_up(
    device: torch.device, family: PlanFamily, change: Callable[[Tensor], object]
) -> None:
    x, calls = torch.randn(4, device=device), iter(range(9))

    def fn() -> object:
        y = x + 1
        return change(y) if next(calls) else y

    with torch.no_grad(), pytest.raises(CaptureError, match="in the warm-up"):
        family.capture(fn)


def test_outputs_of_other_devices_are_refused(device: torch.device, family: PlanFamily) -> None:
    with torch.no_grad(), pytest.raises(CaptureError, match="output is on meta"):
        family.capture(lambda: torch.ones(4, device="meta"))


def test_outputs_of_odd_sizes_lie_side_by_side(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.arange(3.0, device=device)

    def fn() -> list[Tensor]:
        return [x.to(torch.uint8), x.double() + 1, x.to(torch.bool), x + 2, x.half()]

    with torch.no_grad():
        plan = family.capture(fn)
        got = replay(plan)
        assert all(torch.equal(a, b) for a, b in zip(got, fn(), strict=True))
        assert [t.data_ptr() - got[0].data_ptr() for t in got] == [0, 512, 1024, 1536, 2048]
        assert got[0].untyped_storage().nbytes() == family.output_bytes == 5 * 512


def test_a_cycle_that_the_collector_can_free_is_no_leak(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        loop: list[object] = [x * 2]
        loop.append(loop)
        return x + 1

    with torch.no_grad():
        assert torch.equal(family.capture(fn).replay(), x + 1)


def test_a_capture_voids_borrowed_outputs(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: x + 1)
        plan.replay()
        family.capture(lambda: x + 2)
        with pytest.raises(StaleOutputError):
            _ = plan.outputs


def test_copies_are_there_after_the_first_replay(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: x + 1, outputs="copy")
        with pytest.raises(StaleOutputError):
            _ = plan.outputs


def test_a_collector_that_is_off_stays_off(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad(), family.window():
        family.capture(lambda: x + 1)
        assert not gc.isenabled()
    gc.disable()
    try:
        with torch.no_grad():
            family.capture(lambda: x + 1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_failed_capture_closes_its_window(device: torch.device, family: PlanFamily) -> None:
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    x = torch.randn(4, device=device)
    gc.callbacks.append(note)
    try:
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            family.capture(lambda: x + 1 / 0)
        generations.clear()
        with torch.no_grad():
            family.capture(lambda: x + 1)
    finally:
        gc.callbacks.remove(note)
    assert generations[0] == 2  # this is an outermost window again


def test_a_lost_pool_refuses_captures_and_still_replays(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: x + 1)
        family._pool.broken = "the reason"
        with pytest.raises(CaptureUnavailableError, match="the reason"):
            family.capture(lambda: x + 1)
        assert torch.equal(plan.replay(), x + 1)


# Modes.


def test_replays_use_the_autocast_of_the_capture_and_no_other(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, 4, device=device)
    inside: list[torch.dtype] = []

    @eager_on_graph
    def matmul(t: Tensor) -> Tensor:
        inside.append((t @ t).dtype)
        return t * 1

    with torch.no_grad():
        plain, want = family.capture(lambda: matmul(x) + x @ x), x + x @ x
        with torch.autocast(device.type, dtype=torch.bfloat16):
            low = family.capture(lambda: matmul(x) + x @ x)
        with torch.autocast(device.type, dtype=torch.float16):
            inside.clear()
            assert torch.equal(plain.replay(), want)
            low.replay()
    assert inside == [torch.float32, torch.bfloat16]


def test_weights_updated_in_place_reach_replays_under_autocast(device: torch.device, family: PlanFamily) -> None:
    """No autocast cache: neither of the warm-up's casts, nor from one replay to the next."""
    layer, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    marked = eager_on_graph(lambda t: layer(t))
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        plan = family.capture(lambda: marked(x) + layer(x))
        assert torch.is_autocast_cache_enabled()
        for _ in range(2):
            layer.weight.mul_(2)
            torch.clear_autocast_cache()
            want = layer(x) * 2
            torch.clear_autocast_cache()
            assert torch.equal(plan.replay(), want)
