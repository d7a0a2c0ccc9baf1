"""Watching objects runs none of their code, and says each thing once."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import breakgraph
from breakgraph.errors import HazardError
from breakgraph.graph import eager_on_graph, state_walk
from breakgraph.graph.python_state import StateWatch


class Lazy(OrderedDict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("everything would be loaded")

    __iter__ = values = keys = items


class Closed(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("not now")

    __iter__ = __len__  # type: ignore[assignment]


class Meta(type):
    @property
    def __module__(cls) -> Any:  # type: ignore[override]
        return ["odd"]


class Odd(metaclass=Meta):
    pass


@pytest.mark.parametrize("held", [random.SystemRandom(), Lazy(a=1), Closed([1]), Odd(), SimpleNamespace(one=Lazy())])
def test_no_code_of_what_is_watched_runs(held: Any) -> None:
    x = torch.ones(4)
    breakgraph.capture(lambda x: x + (held is not None), x).close()


def test_deep_lists_are_compared() -> None:
    def deep(value: int) -> list[Any]:
        held: list[Any] = [value]
        for _ in range(3000):
            held = [held]
        return held

    space = SimpleNamespace(held=deep(1))
    watch = StateWatch(lambda: space)
    space.held = deep(1)
    assert watch.changed() == []
    space.held = deep(2)
    (change,) = watch.changed()
    assert change.told == "1 -> 2"
    assert len(change.path) < 200


def test_a_break_may_replace_objects() -> None:
    state = {"meta": SimpleNamespace(n=0)}

    @eager_on_graph
    def replaces(x: Tensor) -> Tensor:
        state["meta"] = SimpleNamespace(n=state["meta"].n + 1)
        return x * 1

    breakgraph.capture(lambda x: replaces(x) + len(state), torch.ones(4)).close()


def test_a_container_is_named_once() -> None:
    held = deque(map(float, range(500)), maxlen=500)

    def forward(x: Tensor) -> Tensor:
        held.append(held[-1] + 1)
        return x + 1

    with pytest.raises(HazardError, match=r"and 499 more like it") as caught:
        breakgraph.capture(forward, torch.ones(4))
    assert len(caught.value.report.blocking) == 1


def test_what_is_cut_off_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakgraph.graph.state_walk.MOST_NODES", 3)
    monkeypatch.setattr("breakgraph.graph.python_state.MOST_NODES", 3)
    assert state_walk.MOST_NODES == 3
    held = [[1], [2], [3]]
    with breakgraph.capture(lambda x: x + len(held), torch.ones(4)) as graph:
        assert any("not all of it is looked at" in note for note in graph.explain().notes)


def test_a_ring_of_objects_ends() -> None:
    one, other = SimpleNamespace(n=1), SimpleNamespace(n=1)
    one.next, other.next = other, one
    watch = StateWatch(lambda: one)
    other.n = 2
    assert [(change.path, change.told) for change in watch.changed()] == [("one.next.n", "1 -> 2")]
    watch.forget()


def test_a_list_of_a_million_is_not_looked_into() -> None:
    watch = StateWatch((lambda rows: lambda: rows)([[0]] * 1_000_000))
    assert watch.changed() == []
