"""What only a GPU can show about the capture library: streams, threads, allocator, driver."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from breakgraph.errors import EmptySegmentError, ForeignCaptureError, UncapturableOpError
from breakgraph.graph import PlanFamily, break_graph, eager_on_graph

CUDA = torch.device("cuda")


@pytest.fixture
def family() -> Iterator[PlanFamily]:
    made = PlanFamily(CUDA)
    yield made
    made.close()


@eager_on_graph
def halve(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize("fork", ["stream", "event"])
def test_f16_side_streams_of_a_segment_are_joined_at_the_break(family: PlanFamily, fork: str) -> None:
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device=CUDA)

    def fn() -> Tensor:
        y = x + 1
        if fork == "stream":
            side.wait_stream(torch.cuda.current_stream())
        else:
            event = torch.cuda.Event()
            event.record()
            side.wait_event(event)
        with torch.cuda.stream(side):
            for _ in range(20):
                y = y.sin()
            z = y * 2
            z = halve(z)  # a break inside the side stream's block
            z = z + 1
        torch.cuda.current_stream().wait_stream(side)
        return z * 3

    with torch.no_grad():
        plan = family.capture(fn)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            want = fn().clone()
            family.poison()
            assert torch.equal(plan.replay(), want)


def test_side_streams_of_a_break_are_joined_too(family: PlanFamily) -> None:
    side = torch.cuda.Stream()
    x = torch.randn(1 << 22, device=CUDA)

    @eager_on_graph
    def on_the_side(t: Tensor) -> Tensor:
        with torch.cuda.stream(side):  # neither waits for the main stream nor is waited for
            torch.cuda._sleep(1 << 26)  # whoever does not wait for it is too early
            for _ in range(30):
                t = t.sin()
        return t

    with torch.no_grad():
        plan = family.capture(lambda: on_the_side(x + 1) + 1)
        assert plan.explain().steps[1].side_streams == 1
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            want = x + 1
            for _ in range(30):
                want = want.sin()
            torch.cuda.synchronize()
            assert torch.equal(plan.replay(), want + 1)


def test_a_break_on_a_side_stream_sees_what_the_segment_wrote_at_its_first_run_too(family: PlanFamily) -> None:
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device=CUDA)
    seen: list[Tensor] = []

    @eager_on_graph
    def look(t: Tensor) -> Tensor:
        with torch.cuda.stream(side):  # does not wait for the main stream
            seen.append(t.clone())
        return t * 2

    def fn() -> Tensor:
        torch.cuda._sleep(1 << 26)  # whoever does not wait for the segment is too early
        return look(x + 1)

    family.reserve(8 * x.nbytes)
    family.poison()
    with torch.no_grad():
        family.capture(fn)
        torch.cuda.synchronize()
        assert len(seen) == 2  # the warm-up, and the first run between segments
        assert torch.equal(seen[1], x + 1)


def test_f18_work_on_a_stream_that_is_not_captured_is_an_error(family: PlanFamily) -> None:
    elsewhere = torch.cuda.Stream()
    x = torch.randn(4, device=CUDA)

    def fn() -> Tensor:
        with torch.cuda.stream(elsewhere):
            x.sin()
        break_graph()
        return x * 2

    with torch.no_grad(), pytest.raises(EmptySegmentError, match="not being captured"):
        family.capture(fn)
    with torch.no_grad():
        assert torch.equal(family.capture(lambda: x * 2).replay(), x * 2)


def test_a_marked_call_in_somebody_elses_capture_raises() -> None:
    x = torch.randn(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
    with pytest.raises(ForeignCaptureError, match="halve"), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        halve(x)
    assert not torch.cuda.is_current_stream_capturing()


def test_f19_another_thread_may_copy_pinned_memory_during_a_capture(family: PlanFamily) -> None:
    x, stop, errors = torch.randn(1 << 16, device=CUDA), threading.Event(), []

    def copier() -> None:
        try:
            while not stop.is_set():
                torch.randn(1 << 12).pin_memory().to(CUDA, non_blocking=True).sum().item()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=copier)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(20):
                plan = family.capture(lambda: halve(halve(x + 1) * 3) + 1)
                assert torch.equal(plan.replay(), (x + 1) / 2 * 3 / 2 + 1)
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_a_replay_waits_for_the_one_before_it_on_another_stream(family: PlanFamily) -> None:
    state = torch.zeros(1 << 16, device=CUDA)

    def fn() -> Tensor:
        state.add_(1)
        return halve(state * 2) + 0

    with torch.no_grad():
        plan = family.capture(fn)
        state.zero_()
        torch.cuda.synchronize()
        seen = []
        for stream, cycles in zip([torch.cuda.Stream() for _ in range(3)], (1 << 28, 1 << 27, 0), strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)  # a replay that did not wait would overtake the ones before it
                seen.append(plan.replay().clone())
        torch.cuda.synchronize()
    assert [value.unique().tolist() for value in seen] == [[1], [2], [3]]


def test_memory_goes_back_when_a_family_closes() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(CUDA)
    x = torch.randn(4096, 512, device=CUDA)
    with torch.no_grad():
        model(x)

        def round_trip() -> int:
            family = PlanFamily(CUDA)
            for n in (4096, 1024):
                family.capture(lambda n=n: halve(model(x[:n]))).replay()
            assert family.pool_bytes > 0
            family.close()
            gc.collect()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved()

        first = round_trip()  # libraries keep a workspace for the capture stream
        assert [round_trip() - first for _ in range(3)] == [0, 0, 0]


def test_a_failed_capture_gives_its_memory_back() -> None:
    x = torch.randn(1 << 20, device=CUDA)
    calls = iter(range(9))

    def fn() -> Tensor:
        y = halve(x + 1) * 2
        if next(calls):
            raise ValueError("no")
        return y

    with torch.no_grad():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        family = PlanFamily(CUDA)
        with pytest.raises(ValueError, match="no"):
            family.capture(fn)
        family.close()
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before


def test_f44_closing_one_plan_leaves_its_siblings_alone(family: PlanFamily) -> None:
    """Destroying a graph can free a cuBLAS workspace that other graphs of the stream use: closed plans are parked."""
    with torch.no_grad():
        pairs = [
            (torch.randn(n, 8192, device=CUDA, dtype=torch.bfloat16), torch.randn(8192, n, device=CUDA).bfloat16())
            for n in (16, 128, 512)
        ]
        plans = [family.capture(lambda a=a, b=b: halve(a @ b) @ b.t()[:, :64]) for a, b in pairs]
        plans[0].close()
        gc.collect()
        junk = [torch.full((1 << 20,), float("nan"), device=CUDA) for _ in range(64)]
        for plan, (a, b) in list(zip(plans, pairs, strict=True))[1:]:
            want = (a @ b / 2) @ b.t()[:, :64]
            family.poison()
            assert torch.equal(plan.replay(), want)
        assert all(bool(j.isnan().all()) for j in junk)


def test_pageable_copies_are_refused_and_pinned_ones_kept(family: PlanFamily) -> None:
    pageable, pinned = torch.randn(4), torch.randn(4).pin_memory()
    x = torch.randn(4, device=CUDA)
    with torch.no_grad():
        with pytest.raises(UncapturableOpError, match="pageable"):
            family.capture(lambda: x + pageable.to(CUDA))
        plan = family.capture(lambda: halve(x + pinned.to(CUDA, non_blocking=True)) + 1)
        pinned.copy_(torch.randn(4))
        want = (x + pinned.to(CUDA)) / 2 + 1
        assert torch.equal(plan.replay(), want)


SYNCHRONISE = """
import torch
from breakgraph.errors import CaptureUnavailableError
from breakgraph.graph import PlanFamily
x = torch.randn(4, device="cuda")
calls = iter(range(9))
def bad():
    y = x + 1
    if next(calls):
        torch.cuda.synchronize()  # a CUDA error inside an open segment
    return y
family = PlanFamily("cuda")
with torch.no_grad():
    good = family.capture(lambda: x * 2)
    try:
        family.capture(bad)
    except RuntimeError as error:
        print("first:", "not permitted" in str(error))
    try:
        family.capture(lambda: x * 3)
    except CaptureUnavailableError as error:
        print("refused:", error)
    print("replays:", torch.equal(good.replay(), x * 2))
    family.close()
    with PlanFamily("cuda") as other:
        print("new family:", torch.equal(other.capture(lambda: x.cos() + torch.rand_like(x) * 0).replay(), x.cos()))
"""


def test_after_a_cuda_error_the_family_refuses_with_the_reason_and_a_new_one_works() -> None:
    done = subprocess.run([sys.executable, "-c", SYNCHRONISE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "first: True"
    assert "invalidated an earlier capture" in lines[1]
    assert lines[2:] == ["replays: True", "new family: True"]
