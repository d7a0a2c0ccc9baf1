"""What a trace leaves to marked calls, what it hands them and takes back, and what it says where it cannot go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import breakgraph
from breakgraph.backends import make_backend
from breakgraph.errors import CaptureError, UntraceableError
from breakgraph.graph import PlanFamily, ShapeKey, break_graph, constant, eager_on_graph, mark_eager
from breakgraph.graph.tracing import TracePlace, Untraced

KEY = ShapeKey("toy", 0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


@dataclass
class Pair:
    first: Tensor
    scale: float
    rest: list[Tensor]


class Named(NamedTuple):
    one: Tensor
    other: Tensor


@eager_on_graph
def as_dict(given: dict[str, Any], *, add: float) -> dict[str, Any]:
    return {"sum": given["a"] + given["b"][0] + add, "scale": 0.5, "nothing": None}


@eager_on_graph
def as_pair(pair: Pair) -> Pair:
    return Pair(pair.first * pair.scale, pair.scale * 2, [t.flip(0) for t in pair.rest])


@eager_on_graph
def as_named(one: Tensor, other: Tensor) -> Named:
    return Named(one.t().contiguous().t(), other.sin())


@eager_on_graph(mutates=("out",))
def into(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    out.copy_(x.cumsum(0))
    return out, x.flip(0)


@eager_on_graph
def read(x: Tensor) -> Tensor:
    return x / x.abs().max().item()


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    @eager_on_graph
    def method(self, x: Tensor, power: int) -> Tensor:
        return self.linear(x) ** power

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.method(x + 1, 2)) - 1


def containers(x: Tensor) -> Any:
    made = as_dict({"a": x * 2, "b": [x - 1]}, add=0.25)
    pair = as_pair(Pair(made["sum"], made["scale"], [x, x + 1]))
    named = as_named(pair.first * pair.scale, pair.rest[1])
    return {"out": named.one @ named.other, "rest": pair.rest, "constant": made["nothing"], "input": x}


def in_place(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    same, flipped = into(x * 3, out)
    break_graph()
    return same + flipped + out


def shape_known_before(x: Tensor) -> Tensor:
    shape = (x * 2).size()
    y = read(x.new_ones(shape) + x)
    return y + x.new_ones(shape).cumsum(0) * shape[0]


def declared(x: Tensor) -> Tensor:
    return x * constant(torch.full((), 3.0, device=x.device)) + read(x)


CASES: dict[str, Callable[[torch.device], tuple[Callable[[Tensor], Any], int]]] = {
    "containers": lambda device: (containers, 3),
    "in_place": lambda device: (in_place, 2),
    "shape_known_before": lambda device: (shape_known_before, 1),
    "declared": lambda device: (declared, 1),
    "methods_and_modules": lambda device: (_marked_module(device), 2),
}


def _marked_module(device: torch.device) -> nn.Module:
    module = Marked().to(device).requires_grad_(False)
    mark_eager(module, "inner")
    return module


@pytest.mark.parametrize("name", ["tc_piecewise", "tc_piecewise_inductor"])
@pytest.mark.parametrize("case", CASES)
def test_marked_calls_take_and_give_what_they_do_elsewhere(case: str, name: str, device: torch.device) -> None:
    fn, num_breaks = CASES[case](device)
    x = torch.randn(3, 3, device=device)
    with breakgraph.capture(fn, x, backend=name, verify=True) as graph:
        assert graph.explain().num_breaks == num_breaks
        for _ in range(2):
            x.normal_()
            got, expected = graph.replay(), fn(x)
            if name == "tc_piecewise":
                for one, other in zip(_tensors(got), _tensors(expected), strict=True):
                    assert torch.equal(one, other)
            torch.testing.assert_close(got, expected)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def test_sizes_share_a_trace_whatever_marked_calls_make(family: PlanFamily, device: torch.device) -> None:
    module = Marked().to(device).requires_grad_(False)
    backend = make_backend("tc_piecewise", family)
    # The first is as long as it is wide, which means nothing.
    inputs = {size: torch.randn(size, 3, device=device) for size in (3, 9, 4)}

    def capture(x: Tensor) -> None:
        backend.capture(ShapeKey("toy", x.shape[0]), lambda: module(x))

    for x in inputs.values():
        capture(x)
    for size, x in inputs.items():
        family.poison()
        assert torch.equal(backend.replay(ShapeKey("toy", size)), module(x))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["tc_piecewise", "tc_piecewise_inductor"])
def test_modes_that_the_forward_enters_hold_in_its_breaks(name: str, device: torch.device) -> None:
    seen: list[tuple[bool, bool]] = []

    @eager_on_graph
    def look(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled(device.type)))
        return x @ x

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = look(x)
        with torch.no_grad():
            y = look(y.float())
        return look(y) @ x

    x = torch.randn(3, 3, device=device)
    with breakgraph.capture(forward, x, backend=name) as graph:
        for _ in range(2):
            seen.clear()
            x.normal_()
            got, during = graph.replay().clone(), list(seen)
            seen.clear()
            torch.testing.assert_close(got, forward(x))
            assert during == seen == [(True, True), (False, False), (True, False)]


def test_a_function_that_is_not_looked_into_is_in_the_segment(family: PlanFamily, device: torch.device) -> None:
    calls: list[int] = []

    def hidden(x: Tensor, times: int) -> Tensor:
        calls.append(times)
        return x.sort(0).values * times

    place = {"fn": hidden}
    TracePlace(lambda fn: place.update(fn=fn), hidden, Untraced(hidden))
    x = torch.randn(4, 3, device=device)
    backend = make_backend("tc_piecewise", family)
    backend.capture(KEY, lambda: read(place["fn"](x + 1, 2)) - 1)
    assert place["fn"] is hidden
    assert backend.explain()[KEY].num_breaks == 1
    calls.clear()
    x.normal_()
    assert torch.equal(backend.replay(KEY), read((x + 1).sort(0).values * 2) - 1)
    assert calls == []


def test_what_cannot_be_traced_is_named_with_its_line_and_the_way_out(device: torch.device) -> None:
    usage = np.array([0.05, 0.4, 0.2])

    def forward(x: Tensor) -> Tensor:
        y = read(x)
        return y * sum(usage[i].item() for i in np.flatnonzero(usage > 0.1))

    line = forward.__code__.co_firstlineno + 2
    x = torch.randn(3, 3, device=device)
    where = re.escape(f"{__file__}:{line} in ")
    with pytest.raises(UntraceableError, match=rf"{where}.*\); use backend 'breakable', which needs no tracing"):
        breakgraph.capture(forward, x, backend="tc_piecewise")
    with breakgraph.capture(forward, x) as graph:  # the Python runs once
        assert torch.equal(graph.replay(), forward(x))
    # Nothing of the failed trace is left.
    with breakgraph.capture(lambda x: read(x) + 1, x, backend="tc_piecewise") as graph:
        assert torch.equal(graph.replay(), read(x) + 1)


def test_a_host_read_between_marked_calls_is_refused_by_the_scan_or_made_a_break(device: torch.device) -> None:
    class Steered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum().item() > 0 else x * 3

    model = nn.Sequential(nn.Linear(3, 3), Steered(), nn.Linear(3, 3)).to(device).requires_grad_(False)
    x = torch.randn(2, 3, device=device)
    with pytest.raises(breakgraph.errors.HazardError, match=r"module Sequential\.1"):
        breakgraph.capture(model, x, backend="tc_piecewise")
    with breakgraph.capture(model, x, backend="tc_piecewise", on_hazard="break") as graph:
        assert graph.explain().num_breaks == 1
        for value in (x.clone(), -x.clone()):
            x.copy_(value)
            assert torch.equal(graph.replay(), model(x))


def test_a_context_that_inductor_cannot_be_told_of_is_refused(device: torch.device) -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = read(x) + 1
        return y * x

    x = torch.randn(3, 3, device=device)
    with pytest.raises(CaptureError, match="a context is entered in the forward and left behind a marked call"):
        breakgraph.capture(forward, x, backend="tc_piecewise_inductor")


def test_a_result_that_traced_code_cannot_be_given_is_refused(device: torch.device) -> None:
    @eager_on_graph
    def strange(x: Tensor) -> Any:
        return {1, 2}

    def forward(x: Tensor) -> Tensor:
        strange(x)
        return x + 1

    with pytest.raises(CaptureError, match=r"strange returned set .*, which traced code cannot be given"):
        breakgraph.capture(forward, torch.ones(2, device=device), backend="tc_piecewise")


def test_a_marked_call_that_changes_its_result_is_refused(device: torch.device) -> None:
    widths = iter([3, 3, 3, 4, 4, 4])

    @eager_on_graph
    def growing(x: Tensor) -> Tensor:
        return x.new_zeros(2, next(widths))

    def forward(x: Tensor) -> Tensor:
        return growing(x).sum() + x

    with pytest.raises(CaptureError, match="is not what it returned before the forward was traced"):
        breakgraph.capture(forward, torch.ones(2, device=device), backend="tc_piecewise", on_hazard="raise")


@dataclass
class Scaled:
    value: Tensor
    scale: Any


LATER: dict[str, tuple[Any, Any]] = {
    "number": (lambda t: (t * 2, 3), lambda t: (t * 2, 5)),
    "type": (lambda t: (t * 2, 1), lambda t: (t * 2, True)),
    "container": (lambda t: (t * 2, 3), lambda t: [t * 2, 3]),
    "key": (lambda t: {"a": t * 2, "b": 3}, lambda t: {"a": t * 2, "c": 3}),
    "leaf": (lambda t: Scaled(t * 2, 3), lambda t: Scaled(t * 2, t * 3)),
    "tensor": (lambda t: Scaled(t * 2, t * 3), lambda t: Scaled(t * 2, 3)),
    "argument": (lambda t: t, lambda t: t * 2),
}


@pytest.mark.parametrize("num_calls_before", [3, 4], ids=["when traced", "when captured"])
@pytest.mark.parametrize("change", LATER)
def test_a_call_must_return_the_constants_and_containers_that_were_traced(
    change: str, num_calls_before: int, device: torch.device
) -> None:
    """After the warm-up, the scan and the run that is noted, or after the one as traced too."""
    first, then = LATER[change]
    calls = iter([first] * num_calls_before + [then] * 9)

    @eager_on_graph(mutates=("t",))
    def mid(t: Tensor) -> Any:
        return next(calls)(t)

    def forward(x: Tensor) -> Tensor:
        made = mid(x + 1)
        return sum(leaf for leaf in torch.utils._pytree.tree_leaves(made) if isinstance(leaf, int)) + x

    with pytest.raises(CaptureError, match=r"mid returned .*, which is not what it returned before the forward"):
        breakgraph.capture(forward, torch.ones(2, device=device), backend="tc_piecewise")


class Several(list[Tensor]):
    pass


def test_nan_and_the_argument_itself_are_the_same_at_every_call(device: torch.device) -> None:
    @eager_on_graph(mutates=("t", "empty"))
    def mid(t: Tensor, empty: Tensor) -> Any:
        return t.mul_(2), float("nan"), empty, torch.empty(0, device=device), Several([t + 1])

    def forward(x: Tensor) -> Tensor:
        return mid(x + 1, x[:0] + 1)[0] - 1

    x = torch.ones(2, device=device)
    with breakgraph.capture(forward, x, backend="tc_piecewise") as graph:
        x.fill_(3)
        assert torch.equal(graph.replay(), forward(x))


@pytest.mark.parametrize("name", ["tc_piecewise", "tc_piecewise_inductor"])
@pytest.mark.parametrize(
    "part", [lambda x: x[:, :3], lambda x: x[1:, 2:], lambda x: x[:1, :3].expand(4, 3), lambda x: x.t()[::2]]
)
def test_inputs_may_have_gaps_between_their_elements(
    part: Callable[[Tensor], Tensor], name: str, device: torch.device
) -> None:
    def forward(x: Tensor) -> Tensor:
        return read(x * 2 + 1).tanh() - 1

    whole = torch.randn(4, 5, device=device)
    with breakgraph.capture(forward, part(whole), backend=name) as graph:
        for _ in range(2):
            whole.normal_()
            torch.testing.assert_close(graph.replay(), forward(part(whole)))
