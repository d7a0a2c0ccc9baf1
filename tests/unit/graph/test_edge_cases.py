"""Corners that a reader of the code found, each wrong once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from breakgraph.errors import (
    CaptureError,
    ClosedError,
    ConfigError,
    ReplayError,
    ResultMismatchError,
    UncapturableOpError,
)
from breakgraph.graph import Plan, PlanFamily, eager_on_graph

Replay = Callable[[Plan], Tensor]


@eager_on_graph(mutates=("out",))
def double_into(t: Tensor, out: Tensor) -> Tensor:
    torch.mul(t, 2, out=out)
    return out


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def test_an_outside_tensor_written_through_out(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x, kept = torch.randn(4, device=device), torch.zeros(4, device=device)
    plan = family.capture(lambda: double_into(x + 1, kept) * 1 + kept)
    x.copy_(torch.randn(4, device=device))
    assert torch.equal(replay(plan), (x + 1) * 4)


def test_one_tensor_given_to_be_read_and_to_be_written(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        y = x + 1
        return double_into(y, y) * 1

    plan = family.capture(fn)
    assert torch.equal(replay(plan), (x + 1) * 2)


def test_variadic_parameters_may_be_written(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    @eager_on_graph(mutates=("outs", "named"), valid_rows=lambda: 3)
    def fill(t: Tensor, *outs: Tensor, scale: float = 1.0, **named: Tensor) -> None:
        for out in (*outs, *named.values()):
            out.copy_(t * scale)

    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        a, b, c = (torch.empty_like(x) for _ in range(3))
        fill(x + 1, a, b, scale=2.0, c=c)
        return a + b + c

    plan = family.capture(fn)
    want = (x + 1) * 6
    want[3:] = 0
    assert torch.equal(replay(plan), want)
    assert torch.equal(fn(), want)


def test_nan_is_a_constant_like_any_other(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    value = {"now": float("nan")}
    marked = eager_on_graph(lambda t: (t.clone(), value["now"]))
    plan = family.capture(lambda: marked(x)[0] * 2)
    assert torch.equal(plan.replay(), x * 2)
    value["now"] = 0.0
    with pytest.raises(ResultMismatchError):
        plan.replay()


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda t: t.conj().imag, lambda t: t.real])
def test_lazy_conjugation_and_negation(
    device: torch.device, family: PlanFamily, replay: Replay, view: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 4, dtype=torch.complex64, device=device)
    marked = eager_on_graph(lambda t: t * 1)

    def fn() -> Tensor:
        y = x * 1
        return marked(view(y)) + view(y) * 1

    plan = family.capture(fn)
    assert torch.equal(replay(plan), fn())


def test_named_results_of_torch_functions(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, 4, device=device)
    largest = eager_on_graph(lambda t: t.max(-1))
    plan = family.capture(lambda: (largest(x * 2).values + 1, (x * 3).topk(2)))
    values, top = plan.replay()
    assert torch.equal(values, (x * 2).max(-1).values + 1)
    assert torch.equal(top.values, (x * 3).topk(2).values)


def test_strides_of_single_rows_mean_nothing(device: torch.device, family: PlanFamily) -> None:
    x, turn = torch.randn(4, device=device), {"now": False}
    marked = eager_on_graph(lambda t: t.clone()[:, None].t() if turn["now"] else t.clone()[None])
    plan = family.capture(lambda: marked(x) * 2)
    turn["now"] = True
    assert torch.equal(plan.replay(), x[None] * 2)


def test_more_live_rows_than_rows(device: torch.device, family: PlanFamily) -> None:
    rows = {"now": 6}
    marked = eager_on_graph(lambda t: torch.ones(rows["now"], device=device), valid_rows=lambda: rows["now"])
    plan = family.capture(lambda: marked(torch.ones(6, device=device)) * 1)
    rows["now"] = 7
    with pytest.raises(ResultMismatchError, match="valid_rows returned 7"):
        plan.replay()
    with pytest.raises(ResultMismatchError, match="valid_rows returned 7"):
        eager_on_graph(lambda t: t, valid_rows=lambda: 7)(torch.ones(6, device=device))


def test_results_without_rows_beside_valid_rows(device: torch.device, family: PlanFamily) -> None:
    x = torch.ones(4, device=device)
    marked = eager_on_graph(lambda t: (t * 2, t.sum()), valid_rows=lambda: 4)
    plan = family.capture(lambda: marked(x)[1] + 1)
    assert plan.replay().item() == 5
    assert marked(x)[1].item() == 4


@pytest.mark.parametrize(
    "second",
    [
        lambda x: (x + 1, None),
        lambda x: (x + 1,),
        lambda x: [x + 1, 1],
        lambda x: (x + 1, 2),
        lambda x: (x + 1, True),
    ],
)
def test_a_function_that_returns_something_else_at_capture(
    device: torch.device, family: PlanFamily, second: Callable[[Tensor], object]
) -> None:
    x, calls = torch.ones(4, device=device), iter(range(9))
    with pytest.raises(CaptureError, match="in the warm-up"):
        family.capture(lambda: second(x) if next(calls) else (x + 1, 1))


def test_a_swallowed_error_of_a_break_still_fails_the_capture(device: torch.device, family: PlanFamily) -> None:
    x, calls = torch.ones(4, device=device), iter(range(9))

    @eager_on_graph
    def fragile(t: Tensor) -> Tensor:
        if next(calls):
            raise ValueError("from the break")
        return t.clone()

    def fn() -> Tensor:
        try:
            y = fragile(x)
        except ValueError:
            y = x * 2
        return y + 1

    with pytest.raises(ValueError, match="from the break"):
        family.capture(fn)
    assert torch.equal(family.capture(lambda: x + 1).replay(), x + 1)


def test_a_tensor_of_device_tensors_is_a_host_read(device: torch.device, family: PlanFamily) -> None:
    x = torch.ones(4, device=device)
    with pytest.raises(UncapturableOpError, match="reads their values"):
        family.capture(lambda: x + torch.tensor([(x * 2).sum(), x.max()]).sum())


@pytest.mark.parametrize("use", ["capture", "close", "poison", "reserve"])
def test_a_break_may_not_touch_the_family_that_replays_it(
    device: torch.device, family: PlanFamily, use: str
) -> None:
    x, now = torch.ones(4, device=device), {"now": False}
    calls = {
        "capture": lambda: family.capture(lambda: x * 2),
        "close": family.close,
        "poison": family.poison,
        "reserve": lambda: family.reserve(1),
    }

    @eager_on_graph
    def meddle(t: Tensor) -> Tensor:
        if now["now"]:
            calls[use]()
        return t.clone()

    plan = family.capture(lambda: meddle(x + 1) + 1)
    now["now"] = True
    with pytest.raises(ReplayError, match="own family"):
        plan.replay()
    now["now"] = False
    assert torch.equal(plan.replay(), x + 2)


def test_replays_inside_a_captured_function(device: torch.device, family: PlanFamily) -> None:
    x = torch.ones(4, device=device)
    with PlanFamily(device) as other:
        inner = other.capture(lambda: x * 2, outputs="copy")
        calls = iter(range(9))
        with pytest.raises(CaptureError, match="replayed inside a captured function"):
            family.capture(lambda: (inner.replay() if next(calls) else x) + 1)
        marked = eager_on_graph(lambda: inner.replay())
        plan = family.capture(lambda: marked() + 1)
        x.fill_(3)
        assert torch.equal(plan.replay(), x * 2 + 1)


def test_copied_outputs_of_a_closed_plan(device: torch.device, family: PlanFamily) -> None:
    x = torch.ones(4, device=device)
    plan = family.capture(lambda: x + 1, outputs="copy")
    plan.replay()
    plan.close()
    with pytest.raises(ClosedError):
        _ = plan.outputs


def test_static_methods_are_marked_below(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="@staticmethod above"):
        eager_on_graph(staticmethod(lambda t: t))  # type: ignore[arg-type]
