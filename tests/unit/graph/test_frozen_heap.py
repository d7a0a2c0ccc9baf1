"""Modules that `gc.freeze` hid from the collector are watched like others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from breakgraph.errors import StalePlanError
from breakgraph.graph import Plan, PlanFamily, heap


class Holder:
    """No module, as an engine is none."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = {"models": [module]}


HELD = SimpleNamespace(modules=[])
"""As a global of an imported module."""


def _closure(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x)


def _held_by_an_object(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    holder = Holder(model)
    return lambda: holder.parts["models"][0](x)


def _weight_alone(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    holder = Holder(model)
    return lambda: nn.functional.linear(x, holder.parts["models"][0].weight)


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def replace_weight(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach() + 1)


def check_stale(plan: Plan, model: nn.Linear) -> None:
    plan.replay()
    replace_weight(model)
    with pytest.raises(StalePlanError, match=r"Linear\.weight was"):
        plan.replay()


def test_a_weight_that_is_replaced_is_noticed(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(2, 4, device=device)
    models = [nn.Linear(4, 4).to(device) for _ in range(3)]
    makers = (_closure, _held_by_an_object, _weight_alone)
    functions = [make(model, x) for make, model in zip(makers, models, strict=True)]
    gc.freeze()
    for fn, model in zip(functions, models, strict=True):
        with torch.no_grad():
            check_stale(family.capture(fn), model)


def test_what_was_frozen_later_is_found_too(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(2, 4, device=device)
    models = [nn.Linear(4, 4).to(device) for _ in range(2)]
    for model in models:
        other = nn.Linear(4, 4).to(device)
        fn = _closure(other, x)
        gc.freeze()
        with torch.no_grad():
            check_stale(family.capture(fn), other)
            check_stale(family.capture(_closure(model, x)), model)


def test_functions_that_only_a_local_variable_holds(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(2, 4, device=device)
    models = [nn.Linear(4, 4).to(device) for _ in range(2)]
    first, second = (_closure(model, x) for model in models)
    gc.freeze()
    with torch.no_grad():
        check_stale(family.capture(first), models[0])
        check_stale(family.capture(second), models[1])


def count_of(module: nn.Module) -> int:
    return sum(found is module for found in heap.all_modules())


def test_the_heap_is_walked_once_a_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    remember = heap.remember
    monkeypatch.setattr(heap, "remember", lambda found: (walks.append(1), remember(found)))
    older, younger = nn.Linear(3, 3), nn.Linear(3, 3)
    monkeypatch.setattr(HELD, "modules", [older])
    gc.freeze()
    assert [count_of(older), count_of(older), len(walks)] == [1, 1, 1]
    HELD.modules.append(younger)
    gc.freeze()
    assert [count_of(older), count_of(younger), len(walks)] == [1, 1, 2]
    later = nn.Linear(3, 3)
    assert [count_of(later), len(walks)] == [1, 2]
    gc.unfreeze()
    assert [count_of(older), count_of(younger), count_of(later), len(walks)] == [1, 1, 1, 2]


def test_what_is_remembered_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HELD, "modules", [nn.Linear(3, 3)])
    key = id(HELD.modules[0])
    gc.freeze()
    assert key in map(id, heap.all_modules())
    HELD.modules.clear()
    assert key not in map(id, heap.all_modules())


class Evasive:
    """Answers to no question, as proxies do that have nothing behind them yet."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("nothing behind it")


def test_objects_are_not_asked_what_they_are(device: torch.device, family: PlanFamily) -> None:
    model, x, evasive = nn.Linear(4, 4).to(device), torch.randn(2, 4, device=device), Evasive()

    def fn() -> Tensor:
        assert evasive is not None
        return model(x)

    gc.freeze()
    with torch.no_grad():
        check_stale(family.capture(fn), model)
