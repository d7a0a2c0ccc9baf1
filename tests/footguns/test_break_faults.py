"""Faults of breaks: what they are given, what they give back, and when they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from breakgraph.backends import make_backend
from breakgraph.errors import BreakArgumentError
from breakgraph.graph import Plan, PlanFamily, ShapeKey, eager_on_graph

Replay = Callable[[Plan], object]


class Batch:
    """What changes from step to step, as an object."""

    def __init__(self, offset: float) -> None:
        self.offset = offset


@torch.no_grad()
def test_f05_a_batch_object_is_refused_with_its_path(device: torch.device, family: PlanFamily) -> None:
    x = torch.zeros(4, device=device)

    @eager_on_graph
    def shifted(x: Tensor, *, metadata: dict[str, Batch]) -> Tensor:
        return x + metadata["batch"].offset

    with pytest.raises(BreakArgumentError, match=r"metadata\['batch'\].* would keep its capture-time state"):
        family.capture(lambda: shifted(x + 1, metadata={"batch": Batch(2.0)}))


@torch.no_grad()
def test_f05_what_is_read_inside_the_break_is_the_current_steps(device: torch.device, family: PlanFamily) -> None:
    x, step = torch.zeros(4, device=device), {"offset": 1.0}

    @eager_on_graph
    def shifted(x: Tensor) -> Tensor:
        return x + step["offset"]

    plan = family.capture(lambda: shifted(x + 1) * 2)
    step["offset"] = 10.0
    assert plan.replay().tolist() == [22.0] * 4


@dataclass
class Deep:
    tensors: list[Tensor]
    name: str = "deep"
    more: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def test_f07_tensors_in_any_container_in_and_out(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.zeros(4, device=device)

    @eager_on_graph
    def through(*, x: dict[str, list[Tensor]], deep: Deep) -> tuple[Deep, BaseModelOutput]:
        total = x["x"][0] + x["x"][1] + deep.tensors[0] + deep.more["m"]
        return Deep([total * 2], more={"r": total - 1}), BaseModelOutput(last_hidden_state=total / 2)

    def fn() -> list[Tensor]:
        deep, output = through(x={"x": [x + 1, x * 2]}, deep=Deep([x - 3], more={"m": x.cos()}))
        return [deep.tensors[0] + 1, deep.more["r"] * 2, output.last_hidden_state]

    plan = family.capture(fn)
    for value in (0.5, -2.0):
        x.fill_(value)
        assert all(map(torch.equal, replay(plan), fn()))


@torch.no_grad()
def test_f10_rows_past_the_live_ones_are_zero_and_harm_nothing(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x, weight, live = torch.zeros(8, 4, device=device), torch.randn(4, 4, device=device), [8]

    @eager_on_graph(valid_rows=lambda: live[0])
    def varlen(x: Tensor) -> Tensor:
        out = torch.full_like(x, torch.nan)  # as a kernel leaves what it does not compute
        out[: live[0]] = torch.tanh(x[: live[0]])
        return out

    def fn() -> Tensor:
        mixed = varlen(x + 1) @ weight
        return mixed / mixed.abs().max()  # one bad row would reach all others

    plan = family.capture(fn)
    for live[0] in (3, 8, 1):
        x.copy_(torch.randn(8, 4, generator=torch.Generator().manual_seed(live[0])))
        result = replay(plan)
        expected = torch.tanh(x[: live[0]] + 1) @ weight
        assert torch.equal(result[: live[0]], expected / expected.abs().max())
        assert result[live[0] :].eq(0).all()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["breakable", "debug_eager"])
def test_f29_a_break_inside_a_break_belongs_to_the_outer_one(device: torch.device, backend: str) -> None:
    x, calls = torch.zeros(4, device=device), []

    @eager_on_graph
    def inner(x: Tensor) -> Tensor:
        calls.append("inner")
        return x * 2

    @eager_on_graph
    def outer(x: Tensor) -> Tensor:
        calls.append("outer")
        return inner(x + 1) + inner(x)

    with PlanFamily(device) as family:
        made = make_backend(backend, family)
        key = ShapeKey("step", 4)
        made.capture(key, lambda: outer(x + 1) - 1)
        assert made.explain()[key].num_breaks == 1
        calls.clear()
        x.fill_(2)
        assert made.replay(key).tolist() == [13.0] * 4
        assert calls == ["outer", "inner", "inner"]
        made.close()


@torch.no_grad()
def test_f39_a_break_sees_real_data_at_capture_and_state_is_put_back(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x, cache, seen = torch.full((4,), 3.0, device=device), torch.zeros(4, device=device), []

    @eager_on_graph
    def looks(x: Tensor) -> Tensor:
        seen.append(x.tolist())
        if not x.gt(0).all():
            raise ValueError("garbage")
        return x + 1

    def fn() -> Tensor:
        cache.add_(x)
        return looks(cache * 2)

    plan = family.capture(fn, state=[cache])
    assert cache.tolist() == [0.0] * 4
    assert seen == [[6.0] * 4] * len(seen)  # the warm-up, a trace's two runs, the capture
    assert len(seen) >= 2
    assert replay(plan).tolist() == [7.0] * 4
    assert cache.tolist() == [3.0] * 4
