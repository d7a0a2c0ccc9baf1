"""Modes, history and memory at the edges of breaks and plans; each was wrong once."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from breakgraph.errors import UnwrittenReadError
from breakgraph.graph import PlanFamily, eager_on_graph


def test_modes_opened_around_a_break_hold_at_replay() -> None:
    marked = eager_on_graph(lambda t: (t @ t.t()).float())
    x = torch.randn(4, 4)

    def fn() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = marked(x + 1)
        return y * 1

    with torch.no_grad(), PlanFamily("cpu") as family:
        assert torch.equal(family.capture(fn).replay(), fn())


def test_boundaries_collect_no_autograd_history() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    kept: list[StorageWeakRef] = []

    @eager_on_graph
    def marked(t: torch.Tensor) -> torch.Tensor:
        y = t * 1
        kept.append(StorageWeakRef(y.untyped_storage()))
        return layer(y)

    with PlanFamily("cpu") as family:  # grad mode
        plan = family.capture(lambda: marked(x + 1) * 2)
        kept.clear()
        for _ in range(5):
            plan.replay()
        assert sum(not ref.expired() for ref in kept) <= 1


def test_copied_outputs_are_ordinary_tensors_too() -> None:
    x = torch.randn(4)
    with PlanFamily("cpu") as family:
        with torch.inference_mode():
            plan = family.capture(lambda: x + 1, outputs="copy")
        assert not plan.replay().is_inference()


def test_a_closed_plan_lets_go_of_what_its_segments_read() -> None:
    tables = [torch.zeros(1000)]
    ref = StorageWeakRef(tables[0].untyped_storage())
    with torch.no_grad(), PlanFamily("cpu") as family:
        plan = family.capture(lambda: tables[0] + 1)
        plan.close()
        tables.clear()
        assert ref.expired()


def test_reused_pool_bytes_are_unwritten_again() -> None:
    x = torch.randn(400)

    def fn() -> torch.Tensor:
        first = x * 2
        total = first.sum()
        del first
        return torch.empty_like(x) + total  # the bytes of `first`

    with torch.no_grad(), PlanFamily("cpu") as family, pytest.raises(UnwrittenReadError):
        family.capture(fn)


def test_in_place_views_work_on_the_cpu_device() -> None:
    x = torch.randn(4)
    with torch.no_grad(), PlanFamily("cpu") as family:
        assert family.capture(lambda: (x + 1).unsqueeze_(0) * 1).replay().shape == (1, 4)


def test_a_break_may_reseat_a_tensor_of_its_own_with_set() -> None:
    @eager_on_graph
    def marked(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(0).set_(t.untyped_storage(), 0, t.shape, t.stride()) * 1

    x = torch.randn(4)
    with torch.no_grad(), PlanFamily("cpu") as family:
        assert torch.equal(family.capture(lambda: marked(x + 1) * 1).replay(), x + 1)


def test_a_failed_capture_lets_go_of_what_its_segments_read() -> None:
    tables = [torch.zeros(1000)]
    ref = StorageWeakRef(tables[0].untyped_storage())
    marked, calls = eager_on_graph(lambda t: t.clone()), iter(range(9))

    def fn() -> torch.Tensor:
        y = marked(tables[0] + 1)
        if next(calls):
            raise ValueError("no")
        return y

    with torch.no_grad(), PlanFamily("cpu") as family:
        with pytest.raises(ValueError, match="no") as caught:
            family.capture(fn)
        caught.value.__traceback__ = None
        del caught
        tables.clear()
        gc.collect()
        assert ref.expired()
