"""Faults of the capture itself: collections, exceptions between segments, modes, host reads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from breakgraph.errors import CaptureError
from breakgraph.graph import Plan, PlanFamily, eager_on_graph

Replay = Callable[[Plan], Tensor]


@torch.no_grad()
def test_f20_garbage_is_collected_once_a_window_and_never_inside(
    device: torch.device, family: PlanFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, inside, collections = torch.zeros(4, device=device), [], []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda *args: collections.append(1) or collect(*args))

    def fn() -> Tensor:
        inside.append(gc.isenabled())
        return x + 1

    with family.window():
        for _ in range(3):
            family.capture(fn)
    assert not any(inside)
    assert len(collections) == 1
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        family.capture(lambda: x / (1 // 0))
    assert gc.isenabled()


@torch.no_grad()
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_f28_an_exception_in_a_break_leaves_nothing_open(
    device: torch.device, family: PlanFamily, replay: Replay, failing: int
) -> None:
    x, broken, error = torch.zeros(64, 64, device=device), [True], RuntimeError(f"break {failing}")

    @eager_on_graph
    def fragile(x: Tensor, number: int) -> Tensor:
        if broken[0] and number == failing and calls[0] == 1:  # at the capture, not in the warm-up
            raise error
        return x + number

    calls = [0]

    def fn() -> Tensor:
        made = x
        for number in (1, 2, 3):
            made = fragile(made * 2, number)
        calls[0] += 1
        return made + torch.rand(64, 64, device=device)

    state = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    with pytest.raises(RuntimeError) as raised:
        family.capture(fn)
    assert raised.value is error
    after = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    assert torch.equal(state, after)
    broken[0] = False
    plan = family.capture(fn)
    with PlanFamily(device) as untroubled:
        untroubled.capture(fn)
        assert family.pool_bytes == untroubled.pool_bytes
    torch.manual_seed(7)
    expected = fn()
    torch.manual_seed(7)
    assert torch.equal(replay(plan), expected)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("captured_in", MODES)
@pytest.mark.parametrize("replayed_in", MODES)
def test_f31_any_grad_mode_at_capture_and_at_replay(device: torch.device, captured_in: str, replayed_in: str) -> None:
    weight, x = torch.ones(4, 4, device=device, requires_grad=True), torch.zeros(4, device=device)

    @eager_on_graph
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with PlanFamily(device) as family:
        with MODES[captured_in]():
            plan = family.capture(lambda: doubled(weight @ x) + 1)
        x.fill_(1)
        with MODES[replayed_in]():
            result = plan.replay()
        assert result.tolist() == [9.0] * 4
        assert not result.requires_grad


@torch.no_grad()
@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x[x > 0], "index|nonzero"),
        (lambda x: x.cpu(), "cpu|copy|to"),
        (lambda x: torch.linalg.solve(torch.eye(4, device=x.device), x), "_linalg_check_errors"),
        (lambda x: "some" if x.any() else "none", "_local_scalar_dense|data-dependent branching"),
    ],
    ids=["item", "tolist", "mask", "cpu", "solve", "bool"],
)
def test_f25_what_waits_for_the_device_is_named_with_its_line_and_works_in_a_break(
    device: torch.device, family: PlanFamily, read: Callable[[Tensor], object], named: str
) -> None:
    x = torch.ones(4, device=device)

    def fn() -> Tensor:
        y = x * 2
        read(y)
        return y + 1

    with pytest.raises(CaptureError, match=rf"(?s)({named}).*test_capture_faults\.py"):
        family.capture(fn)

    @eager_on_graph
    def reads(y: Tensor) -> None:
        read(y)

    def with_break() -> Tensor:
        y = x * 2
        reads(y)
        return y + 1

    assert family.capture(with_break).replay().tolist() == [3.0] * 4
