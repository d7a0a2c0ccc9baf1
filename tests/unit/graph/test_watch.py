"""Looking on at breaks: the same tensors in an eager run and in a replay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from breakgraph.errors import CaptureError
from breakgraph.graph import BreakWatcher, PlanFamily, eager_on_graph, watch_eager
from breakgraph.graph.eager_break import BreakSpec


class Notes(BreakWatcher):
    def __init__(self) -> None:
        self.seen: list[tuple[str, list[list[float]]]] = []

    def before(self, spec: BreakSpec, tensors: Sequence[Tensor], mutated: Sequence[Tensor]) -> None:
        own = {id(t) for t in mutated}
        self.seen.append((f"before {spec.name.split('.')[-1]}", [t.tolist() for t in tensors if id(t) not in own]))

    def after(self, spec: BreakSpec, mutated: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self.seen.append((f"after {spec.name.split('.')[-1]}", [t.tolist() for t in (*mutated, *results)]))


@eager_on_graph
def inner(x: Tensor) -> Tensor:
    return x + 1


@eager_on_graph
def outer(x: Tensor, pair: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = inner(x) + pair["a"]
    return y, y


@eager_on_graph(mutates=("out",))
def fill(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x)
    return out


def forward(x: Tensor) -> Tensor:
    y, _ = outer(x * 2, {"a": x})
    return fill(y, torch.empty_like(y)) * 3


def test_eager_and_replay_show_the_same(device: torch.device) -> None:
    x = torch.tensor([1.0, 2.0], device=device)
    eager, replayed, never = Notes(), Notes(), Notes()
    with torch.no_grad(), PlanFamily(device) as family:
        plan = family.capture(lambda: forward(x))
        x.copy_(torch.tensor([3.0, 4.0]))
        with watch_eager(eager):
            forward(x)
        with family.watching(replayed):
            plan.replay()
        plan.replay()
        with watch_eager(never, breaks=False):
            forward(x)
    assert eager.seen == replayed.seen
    assert eager.seen == [
        ("before outer", [[6.0, 8.0], [3.0, 4.0]]),
        ("after outer", [[10.0, 13.0]]),
        ("before fill", [[10.0, 13.0]]),
        ("after fill", [[10.0, 13.0]]),
    ]
    assert never.seen == []


def test_not_while_capturing(device: torch.device) -> None:
    def look() -> Tensor:
        with watch_eager(BreakWatcher()):
            return forward(torch.ones(2, device=device))

    with torch.no_grad(), PlanFamily(device) as family, pytest.raises(CaptureError, match="look on at an eager run"):
        family.capture(look)
