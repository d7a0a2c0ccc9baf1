"""Breaks: corners that mutating the library showed no other test to hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from breakgraph.errors import (
    BreakResultError,
    ResultMismatchError,
    UnknownNameError,
)
from breakgraph.graph import Plan, PlanFamily, eager_on_graph, mark_eager

Replay = Callable[[Plan], Tensor]


@eager_on_graph(mutates=("out",))
def copy_into_out(t: Tensor, out: Tensor) -> Tensor:
    out.copy_(t)
    return out


# Results of breaks.


class Live:
    rows = 6


@pytest.fixture(autouse=True)
def _all_rows_live() -> None:
    Live.rows = 6


def test_the_tail_of_a_prefix_result_is_zero(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    """Alone in its plan: no other boundary has zeroed the same bytes before."""
    prefix = eager_on_graph(lambda t: t[: Live.rows] * 4, valid_rows=lambda: Live.rows)
    x = torch.randn(6, 3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: prefix(x + 1) * 1)
        for Live.rows in (2, 5, 6, 1):
            want = (x + 1) * 4
            want[Live.rows :] = 0
            assert torch.equal(replay(plan), want)


@pytest.mark.parametrize("rows", [-1, 7])
def test_live_rows_outside_of_the_result_are_a_mismatch(device: torch.device, family: PlanFamily, rows: int) -> None:
    marked = eager_on_graph(lambda t: t * 2, valid_rows=lambda: Live.rows)
    x = torch.randn(6, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: marked(x) * 1)
        Live.rows = rows
        with pytest.raises(ResultMismatchError, match=f"valid_rows returned {rows}"):
            plan.replay()


@pytest.mark.parametrize("shape", [(1, 3), (3,), (2, 1), (4, 3), (2, 3, 1)])
def test_a_prefix_has_exactly_the_live_rows(device: torch.device, family: PlanFamily, shape: tuple[int, ...]) -> None:
    given = {"shape": (6, 3)}
    marked = eager_on_graph(lambda t: t.new_ones(given["shape"]), valid_rows=lambda: Live.rows)
    x = torch.randn(6, 3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: marked(x) * 1)
        given["shape"], Live.rows = shape, 2
        with pytest.raises(ResultMismatchError):
            plan.replay()


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (lambda t: (t.clone(), 1), lambda t: t.clone()),
        (lambda t: [t.clone()], lambda t: t.clone()),
        (lambda t: {"a": t.clone()}, lambda t: None),
        (lambda t: t.clone(), lambda t: t.to("meta")),
    ],
)
def test_results_keep_structure_and_device(
    device: torch.device, family: PlanFamily, first: Callable[[Tensor], object], later: Callable[[Tensor], object]
) -> None:
    behaviour = {"now": first}
    marked = eager_on_graph(lambda t: behaviour["now"](t))
    x = torch.randn(3, device=device)

    def fn() -> Tensor:
        marked(x)
        return x * 2

    with torch.no_grad():
        plan = family.capture(fn)
        behaviour["now"] = later
        with pytest.raises(ResultMismatchError):
            plan.replay()


@pytest.mark.parametrize(
    "make", [lambda out: out[1:], lambda out: out.t(), lambda out: out.flatten(), lambda out: out.view(torch.int32)]
)
def test_part_of_a_written_argument_is_not_the_argument(
    device: torch.device, family: PlanFamily, make: Callable[[Tensor], Tensor]
) -> None:
    marked = eager_on_graph(lambda t, out: make(out.copy_(t)), mutates=("out",))
    x = torch.randn(3, 3, device=device)
    with torch.no_grad(), pytest.raises(BreakResultError, match="overlaps an argument"):
        family.capture(lambda: marked(x + 1, torch.empty_like(x)) * 1)


def test_a_written_argument_may_come_back_as_another_object(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    marked = eager_on_graph(lambda t, out: out.copy_(t).view_as(out), mutates=("out",))
    x = torch.randn(3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: marked(x + 1, torch.empty_like(x)) * 1)
        assert torch.equal(replay(plan), x + 1)
    assert plan.explain().steps[1].boundary_bytes == 0


def test_a_written_argument_that_only_the_result_refers_to_stays_allocated(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x = torch.randn(1000, device=device)

    def fn() -> Tensor:
        y = copy_into_out(x * 2, torch.empty_like(x))
        others = [x * n for n in range(3, 6)]  # would land in y's block
        return y + sum(others)

    with torch.no_grad():
        plan = family.capture(fn)
        assert torch.equal(replay(plan), fn())


def test_two_shapes_of_one_result_are_refused(device: torch.device, family: PlanFamily) -> None:
    marked = eager_on_graph(lambda t: (lambda y: (y, y.flatten(), y.t()))(t * 2))
    x = torch.randn(3, 3, device=device)
    with torch.no_grad(), pytest.raises(BreakResultError, match="overlap"):
        family.capture(lambda: marked(x)[0] * 1)


def test_first_results_are_not_kept(device: torch.device, family: PlanFamily) -> None:
    made: list[StorageWeakRef] = []

    @eager_on_graph
    def fresh(t: Tensor) -> Tensor:
        y = t * 2
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    x = torch.randn(3, device=device)
    with torch.no_grad():
        family.capture(lambda: fresh(x + 1) + 1).replay()
    assert [ref.expired() for ref in made] == [True] * 3


# Arguments of breaks.


def test_modules_and_sizes_are_arguments(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    @eager_on_graph
    def apply(layer: nn.Module, t: Tensor, size: torch.Size) -> Tensor:
        assert isinstance(size, torch.Size)
        return layer(t).expand(size)

    layer, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: apply(layer, x + 1, x.shape) * 2)
        assert torch.equal(replay(plan), layer(x + 1) * 2)


def test_a_buffer_outside_the_pool_may_be_written_by_a_break_and_read_later(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x, cache = torch.randn(4, device=device), torch.zeros(4, device=device)

    def fn() -> Tensor:
        copy_into_out(x + 1, cache)
        return cache * 2

    with torch.no_grad():
        plan = family.capture(fn)
        x.copy_(torch.randn(4, device=device))
        assert torch.equal(replay(plan), (x + 1) * 2)


def test_arguments_and_outputs_are_detached(device: torch.device, family: PlanFamily) -> None:
    inside: list[bool] = []

    @eager_on_graph
    def spy(t: Tensor, weight: Tensor) -> Tensor:
        inside.append(t.requires_grad or weight.requires_grad)
        return t.detach() * 2

    layer, x = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device)
    plan = family.capture(lambda: layer(spy(layer(x), layer.weight)))
    del inside[0]  # the warm-up is plain eager code
    assert not plan.replay().requires_grad
    assert inside == [False, False]


def test_outputs_of_a_capture_in_inference_mode_are_ordinary_tensors(device: torch.device, family: PlanFamily) -> None:
    x, weight = torch.randn(4, device=device), torch.ones(4, device=device, requires_grad=True)
    with torch.inference_mode():
        plan = family.capture(lambda: x + 1)
    (plan.replay() * weight).sum().backward()  # an inference tensor cannot be saved for backward
    assert torch.equal(weight.grad, x + 1)


def test_marking_twice_is_marking_once(device: torch.device) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    first = mark_eager(model, "0")
    assert mark_eager(model, "*").names == ["1"]
    first.remove()
    first.remove()
    assert "forward" not in model[0].__dict__


def test_the_model_itself_is_not_one_of_its_modules() -> None:
    with pytest.raises(UnknownNameError, match="module pattern"):
        mark_eager(nn.Tanh(), "*")


def test_marks_pass_on_what_they_declare(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    class Into(nn.Module):
        def forward(self, t: Tensor, out: Tensor) -> None:
            out.fill_(float("nan"))
            out[:, : Live.rows] = t[:, : Live.rows]

    model, x = nn.Sequential(Into()), torch.randn(2, 6, device=device)
    mark_eager(model, "0", mutates=("out",), valid_rows=lambda: Live.rows, row_dim=1)

    def fn() -> Tensor:
        out = torch.empty_like(x)
        model[0](x + 1, out=out)
        return out * 1

    with torch.no_grad():
        plan = family.capture(fn)
        Live.rows = 4
        want = x + 1
        want[:, 4:] = 0
        assert torch.equal(replay(plan), want)
        assert torch.equal(fn(), want)
    assert [step.name for step in plan.explain().steps if step.kind == "break"] == ["0"]


def test_written_tensors_are_found_in_containers(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    @eager_on_graph(mutates=("outs",))
    def fill(t: Tensor, outs: dict[str, list[Tensor]]) -> None:
        for out in outs["all"]:
            out.copy_(t)

    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        outs = [torch.empty_like(x), torch.empty_like(x)]
        fill(x + 1, outs={"all": outs})
        return outs[0] + outs[1]

    with torch.no_grad():
        assert torch.equal(replay(family.capture(fn)), fn())


def test_tails_of_results_hold_without_a_capture_too(device: torch.device) -> None:
    full = eager_on_graph(lambda t: t.clone(), valid_rows=lambda: 1)
    x = torch.ones(3, device=device)
    assert full(x).tolist() == [1, 0, 0]
