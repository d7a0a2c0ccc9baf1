"""What may go into a break, and what must come out of it at every replay."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from breakgraph.errors import BreakArgumentError, ConfigError, ResultMismatchError, UnknownNameError
from breakgraph.graph import Plan, PlanFamily, eager_on_graph, mark_eager

Pair = namedtuple("Pair", "left right")


class Side(enum.Enum):
    LEFT = "left"


@dataclasses.dataclass(frozen=True)
class Packet:
    tensors: list[Tensor]
    scale: float


@dataclasses.dataclass
class Batch:
    lens: object


def test_any_container_carries_arguments_and_results(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]
) -> None:
    x = torch.randn(4, device=device)

    @eager_on_graph
    def spread(p: Pair, /, packet: Packet, *rest: Tensor, side: Side, **more: object) -> OrderedDict[str, object]:
        total = p.left + p.right + sum(packet.tensors) * packet.scale + sum(rest) + more["extra"][0]["t"]  # type: ignore[index]
        return OrderedDict(packet=Packet([total, total * 2], 3.0), pair=Pair(total - 1, None), side=side)

    def fn() -> Tensor:
        got = spread(Pair(x, x * 2), Packet([x * 3], 0.5), x + 1, x + 2, side=Side.LEFT, extra=({"t": x * 4},))
        assert isinstance(got, OrderedDict)
        packet, pair = got["packet"], got["pair"]
        assert isinstance(packet, Packet)
        assert isinstance(pair, Pair)
        assert got["side"] is Side.LEFT
        return packet.tensors[0] + packet.tensors[1] * packet.scale + pair.left

    with torch.no_grad():
        plan = family.capture(fn)
        x.copy_(torch.randn(4, device=device))
        assert torch.equal(replay(plan), fn())


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        (lambda: {"batch": [1, object()]}, r"value\['batch'\]\[1\]"),
        (lambda: Packet([], {1, 2}), r"value\.scale"),  # type: ignore[arg-type]
        (lambda: lambda: 0, "argument value of .* is function"),
    ],
)
def test_an_argument_that_would_go_stale_is_refused_with_its_path(
    device: torch.device, family: PlanFamily, argument: Callable[[], object], path: str
) -> None:
    marked = eager_on_graph(lambda t, value: t.clone())
    x = torch.randn(4, device=device)
    with torch.no_grad(), pytest.raises(BreakArgumentError, match=path):
        family.capture(lambda: marked(x + 1, argument()) + 1)


def test_a_host_tensor_made_in_the_capture_is_refused(device: torch.device, family: PlanFamily) -> None:
    marked = eager_on_graph(lambda t, lens: t.clone())
    x = torch.randn(4, device=device)
    with torch.no_grad(), pytest.raises(BreakArgumentError, match="host tensor"):
        family.capture(lambda: marked(x + 1, torch.tensor([1, 2])) + 1)


def test_what_changes_is_read_inside_the_break(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]
) -> None:
    step = {"lens": [2, 2]}

    @eager_on_graph
    def by_request(t: Tensor) -> Tensor:
        return torch.cat([part * i for i, part in enumerate(t.split(step["lens"]), 1)])

    x = torch.randn(4, 3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: by_request(x + 1) * 2)
        step["lens"] = [1, 2, 1]
        assert torch.equal(replay(plan), by_request(x + 1) * 2)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda t: t.clone()[:1], "shape"),
        (lambda t: t.double(), "float64"),
        (lambda t: t.clone().t().contiguous().t(), "strides"),
        (lambda t: (t.clone(),), "structure"),
        (lambda t: None, "NoneType"),
        (lambda t: t.clone()[:, :1].clone(), "shape"),
    ],
)
def test_results_must_match_at_every_replay(
    device: torch.device, family: PlanFamily, later: Callable[[Tensor], object], message: str
) -> None:
    behaviour = {"now": lambda t: t.clone()}
    marked = eager_on_graph(lambda t: behaviour["now"](t))
    x = torch.randn(3, 3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: marked(x + 1) * 2)
        behaviour["now"] = later
        with pytest.raises(ResultMismatchError, match=message):
            plan.replay()
        behaviour["now"] = lambda t: t.clone()
        assert torch.equal(plan.replay(), (x + 1) * 2)  # the plan is not hurt


@pytest.mark.parametrize(("first", "then"), [(1, 2), (True, 1), (None, 0), ("a", "b"), (1.0, 1)])
def test_constant_results_must_be_the_captured_ones(
    device: torch.device, family: PlanFamily, first: object, then: object
) -> None:
    value = {"now": first}
    marked = eager_on_graph(lambda t: (t.clone(), value["now"]))
    x = torch.randn(3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: marked(x)[0] * 2)
        plan.replay()
        value["now"] = then
        with pytest.raises(ResultMismatchError, match="when the plan was captured"):
            plan.replay()


def test_a_written_argument_must_be_returned_again(device: torch.device, family: PlanFamily) -> None:
    fresh = {"now": False}

    @eager_on_graph(mutates=("out",))
    def fill(t: Tensor, out: Tensor) -> Tensor:
        out.copy_(t)
        return out.clone() if fresh["now"] else out

    x = torch.randn(3, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: fill(x, torch.empty_like(x)) * 2)
        fresh["now"] = True
        with pytest.raises(ResultMismatchError, match="argument"):
            plan.replay()


class Live:
    rows = 6


def test_rows_past_the_live_ones_are_zero(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], tuple[Tensor, ...]]
) -> None:
    """A varlen kernel leaves the tail as it was (here: NaN); a result may also be just the live rows."""

    @eager_on_graph(mutates=("out",), valid_rows=lambda: Live.rows, row_dim=1)
    def varlen_into(t: Tensor, out: Tensor) -> None:
        out.fill_(float("nan"))
        out[:, : Live.rows] = t[:, : Live.rows] * 2

    @eager_on_graph(valid_rows=lambda: Live.rows, row_dim=1)
    def varlen(t: Tensor) -> Tensor:
        full = torch.full_like(t, float("nan"))
        full[:, : Live.rows] = t[:, : Live.rows] * 3
        return full

    @eager_on_graph(valid_rows=lambda: Live.rows, row_dim=1)
    def prefix(t: Tensor) -> Tensor:
        return t[:, : Live.rows] * 4

    x = torch.randn(2, 6, 3, device=device)

    def fn() -> tuple[Tensor, ...]:
        out = torch.empty_like(x)
        varlen_into(x + 1, out)
        return out * 1, varlen(x + 1) * 1, prefix(x + 1) * 1

    with torch.no_grad():
        plan = family.capture(fn)
        for rows in (2, 6, 0, 5):
            Live.rows = rows
            x.copy_(torch.randn(2, 6, 3, device=device))
            for factor, got in zip((2, 3, 4), replay(plan), strict=True):
                want = (x + 1) * factor
                want[:, rows:] = 0
                assert torch.equal(got, want), (rows, factor)
        Live.rows = 7
        with pytest.raises(ResultMismatchError, match="valid_rows returned 7"):
            plan.replay()
    Live.rows = 6


def test_valid_rows_hold_without_a_capture_too(device: torch.device) -> None:
    @eager_on_graph(mutates=("out",), valid_rows=lambda: 1)
    def into(t: Tensor, out: Tensor) -> None:
        out.copy_(t)

    x, out = torch.ones(3, 2, device=device), torch.full((3, 2), float("nan"), device=device)
    into(x, out=out)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_methods_static_methods_and_plain_calls(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]
) -> None:
    class Layer(nn.Module):
        factor = 3

        @eager_on_graph
        def mix(self, x: Tensor, *, bias: float = 0.0) -> Tensor:
            """Documented."""
            return x * self.factor + bias

        @staticmethod
        @eager_on_graph
        def minus(x: Tensor) -> Tensor:
            return x - 1

        def forward(self, x: Tensor) -> Tensor:
            return self.minus(self.mix(x + 1, bias=0.5)) * 2

    layer, x = Layer(), torch.randn(4, device=device)
    assert Layer.mix.__doc__ == "Documented."
    assert torch.equal(layer(x), ((x + 1) * 3 + 0.5 - 1) * 2)
    with torch.no_grad():
        plan = family.capture(lambda: layer(x))
        layer.factor = 5  # the instance is read live, inside the break
        assert torch.equal(replay(plan), layer(x))
    assert [s.name for s in plan.explain().steps if s.kind == "break"] == [
        "test_methods_static_methods_and_plain_calls.Layer.mix",
        "test_methods_static_methods_and_plain_calls.Layer.minus",
    ]


def test_a_mark_around_a_marked_method_has_declarations_of_its_own(device: torch.device) -> None:
    class Base:
        @eager_on_graph
        def sums(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    x = torch.ones(4, device=device)
    assert Base().sums(x).tolist() == [1, 2, 3, 4]

    class Live(Base):
        sums = eager_on_graph(Base.sums, valid_rows=lambda: 2)

    assert Live().sums(x).tolist() == [1, 2, 0, 0]


def test_mark_eager_by_module_name(device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Tanh()).to(device)
    x = torch.randn(2, 4, device=device)
    marks = mark_eager(model, "1.*")
    assert marks.names == ["1.0", "1.1"]
    with torch.no_grad():
        plan = family.capture(lambda: model(x))
        assert plan.num_breaks == 2
        x.copy_(torch.randn(2, 4, device=device))
        assert torch.equal(replay(plan), model(x))
        marks.remove()
        assert family.capture(lambda: model(x)).num_breaks == 0
    assert "forward" not in model[1][0].__dict__


def test_marks_give_back_the_forward_that_was_there(device: torch.device) -> None:
    model = nn.Sequential(nn.Tanh())
    own = model[0].forward = lambda x: x * 2  # type: ignore[method-assign]
    marks = mark_eager(model, "0")
    assert model[0].forward is not own
    marks.remove()
    assert model[0].forward is own


def test_misspelt_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"'\*\.attn'.*known: 0, 1"):
        mark_eager(nn.Sequential(nn.Tanh(), nn.Tanh()), "*.attn")
    with pytest.raises(ConfigError, match="known: out, x"):
        eager_on_graph(mutates=("output",))(lambda x, out: None)
