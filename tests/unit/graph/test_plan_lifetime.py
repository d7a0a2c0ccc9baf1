"""Threads, closing and reports: corners that mutating the library showed no other test to hold."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from breakgraph.errors import (
    ClosedError,
    PoolLeakError,
    UnwrittenReadError,
)
from breakgraph.graph import Plan, PlanFamily, ShapeKey, eager_on_graph
from breakgraph.graph.tree import describe, is_constant, tree_leaves


@eager_on_graph
def double(t: Tensor) -> Tensor:
    return t * 2


# Replays of several threads.


def give_way() -> None:
    for _ in range(2000):
        time.sleep(0)


def test_replays_of_several_threads_take_turns(device: torch.device, family: PlanFamily) -> None:
    @eager_on_graph
    def slow(t: Tensor) -> Tensor:
        for _ in range(20):
            time.sleep(0)
        return t * 2

    inputs = [torch.full((64,), float(n), device=device) for n in range(4)]
    with torch.no_grad():
        plans = [family.capture(lambda x=x: slow(x + 1) + 1, outputs="copy") for x in inputs]
    wrong: list[object] = []

    def replay_often(n: int) -> None:
        try:
            for _ in range(25):
                if not bool((plans[n].replay() == 2 * n + 3).all()):
                    wrong.append(n)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=replay_often, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_replay_waits_for_a_capture_and_the_other_way_round(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    order: list[str] = []
    other: list[threading.Thread] = []

    def beside(what: Callable[[], object]) -> None:
        thread = threading.Thread(target=lambda: (what(), order.append("other")))
        thread.start()
        other.append(thread)
        give_way()
        order.append("this")

    with torch.no_grad(), family.window():
        plan = family.capture(lambda: x + 1)
        first = iter([True])
        family.capture(lambda: (beside(plan.replay) if next(first, False) else None, x + 1)[1])
        other.pop().join()
        assert order == ["this", "other"]

        order.clear()
        during = {"now": False}
        marked = eager_on_graph(
            lambda t: (beside(lambda: family.capture(lambda: x + 2)) if during["now"] else None, t * 2)[1]
        )
        plan = family.capture(lambda: marked(x) + 1)
        during["now"] = True
        plan.replay()
        other.pop().join()
        assert order == ["this", "other"]


def test_marked_calls_of_other_threads_are_plain_during_a_capture(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    got: list[Tensor] = []

    @eager_on_graph
    def elsewhere(t: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: got.append(double(x)))
        thread.start()
        thread.join()
        return t * 1

    with torch.no_grad():
        plan = family.capture(lambda: elsewhere(x) + 1)
    assert plan.num_breaks == 1
    assert all(torch.equal(t, x * 2) for t in got)


# Closing.


def test_closing_gives_back_what_only_breaks_read(device: torch.device, family: PlanFamily) -> None:
    def captured(n: int) -> tuple[Plan, StorageWeakRef]:
        table = torch.full((4,), float(n), device=device)
        return family.capture(lambda: double(table) + 1), StorageWeakRef(table.untyped_storage())

    with torch.no_grad():
        (one, first), (two, second), (_, third) = captured(1), captured(2), captured(3)
        gc.collect()
        assert two.replay().tolist() == [5.0] * 4
        assert not any(ref.expired() for ref in (first, second, third))
        one.close()
        assert first.expired()
        family.close()
        assert second.expired()
        assert third.expired()


def test_a_closed_plan_is_forgotten(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: x + 1)
        plan.replay()
        plan.close()
        with pytest.raises(ClosedError):
            _ = plan.outputs
        family.capture(lambda: x + 1).replay()
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_a_closed_family_holds_nothing(device: torch.device) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad(), PlanFamily(device) as family:
        family.capture(lambda: x + 1)
        assert family.pool_bytes > 0
        assert family.output_bytes > 0
    assert (family.pool_bytes, family.output_bytes) == (0, 0)
    for use in (lambda: family.reserve(1), lambda: family.capture(lambda: x + 1)):
        with pytest.raises(ClosedError):
            use()


# Reports.


def test_the_report_says_what_a_plan_holds(device: torch.device, family: PlanFamily) -> None:
    x, table = torch.randn(1000, device=device), torch.randn(500, device=device)
    marked = eager_on_graph(lambda t, u, n: t + u.sum() * n)

    def fn() -> Tensor:
        return marked(x, table, 1) + x

    with torch.no_grad():
        plan, again = family.capture(fn, label="first"), family.capture(fn)
        plan.replay()
        again.close()
    report = plan.explain()
    assert [(step.kind, step.name) for step in report.steps][::2] == [("segment", "0"), ("segment", "1")]
    assert (report.num_segments, report.num_breaks, report.replays) == (2, 1, 1)
    assert (report.steps[1].arguments, report.steps[1].boundary_bytes) == (2, 4000)
    assert report.output_bytes == 4000
    assert report.pinned_bytes == 4000 + 2000 + family.output_bytes
    assert report.pool_growth_bytes == family.pool_bytes
    assert again.explain().pinned_bytes == again.explain().pool_growth_bytes == 0
    text = str(report)
    assert text.startswith(f"first on {device}")
    assert "segment 0: 0 ops, 0 nodes (empty: not launched)" in text
    assert "2 tensors in, copies 4000 bytes" in text
    assert f"pool +{family.pool_bytes / 2**20:.2f} MiB" in text
    assert report.to_dict()["num_breaks"] == 1
    assert report.to_dict()["steps"][1]["boundary_bytes"] == 4000


def test_failed_replays_are_not_counted(device: torch.device, family: PlanFamily) -> None:
    fail = {"now": False}
    marked = eager_on_graph(lambda t: t * (1 / (not fail["now"])))
    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: marked(x) + 1)
        plan.replay()
        fail["now"] = True
        with pytest.raises(ZeroDivisionError):
            plan.replay()
    assert plan.num_replays == 1


def test_keys_show_all_they_hold() -> None:
    assert str(ShapeKey("decode", 8, (("window", 128),))) == "decode[8,window=128]"
    assert str(ShapeKey("decode", 8)) == "decode[8]"


def test_descriptions_are_short() -> None:
    assert describe("x" * 100) == "str '" + "x" * 56 + "..."
    assert all(map(is_constant, (1j, ..., torch.strided, torch.channels_last)))
    assert tree_leaves(torch.Size([1, 2])) == [("", torch.Size([1, 2]))]


# The CPU device.


def test_what_another_plan_wrote_is_not_written_while_capturing() -> None:
    x = torch.randn(4, 4)

    def half_written() -> Tensor:
        y = torch.empty_like(x)
        y[:2] = x[:2]
        return y.sum(0)

    with torch.no_grad(), PlanFamily("cpu") as family:
        family.capture(lambda: (x * 2) @ (x * 3)).replay()
        with pytest.raises(UnwrittenReadError):
            family.capture(half_written)


def test_holders_are_found_beside_tensors_without_memory(family: PlanFamily) -> None:
    """Those of a trace, which live on in the caches of torch.compile."""
    with FakeTensorMode():
        fakes = [torch.empty(3)]
    held: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        held[:] = [x * 2]
        return held[0] + 1

    x = torch.ones(3, device=family.device.torch_device)
    with pytest.raises(PoolLeakError, match="held by"):
        family.capture(lambda: forward(x))
    held.clear()
    assert len(fakes) == 1
