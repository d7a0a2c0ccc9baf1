"""Cutting a pool into runs: what a capture allocates, played back on paper."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.graph import AllocationTrace, PlanFamily, choose_runs, packing
from breakgraph.graph.packing import pool_bytes, segment_bytes

MIB = 1 << 20


def trace_of(*steps: tuple[str, int]) -> AllocationTrace:
    """Steps are (name, MiB): the first takes them, the second gives them back."""
    numbers: dict[str, int] = {}
    return AllocationTrace(tuple((numbers.setdefault(name, len(numbers)), size * MIB) for name, size in steps))


# What stays sits down where the wide ones have been; they then fit nowhere.
FRAGMENTING = trace_of(
    ("wide", 100), ("wide", 100), ("stays", 40), ("wider", 120), ("wider", 120), ("rest", 50), ("widest", 160),
    ("widest", 160), ("rest", 50), ("stays", 40),
)  # fmt: skip


def test_a_free_run_is_used_and_split_and_merged_again() -> None:
    trace = trace_of(("a", 60), ("b", 40), ("a", 60), ("b", 40), ("all", 100), ("all", 100))
    assert trace.peak_bytes == 100 * MIB
    assert pool_bytes((100 * MIB,), [trace]) == 100 * MIB
    # Two segments never become one.
    assert pool_bytes((), [trace]) == 200 * MIB


def test_the_smallest_run_that_fits_is_taken() -> None:
    trace = trace_of(("a", 30), ("b", 100), ("b", 100), ("a", 30))
    assert pool_bytes((30 * MIB, 100 * MIB), [trace]) == 130 * MIB
    assert pool_bytes((100 * MIB, 32 * MIB), [trace]) == 132 * MIB


def test_between_equal_runs_the_unluckier_choice_counts() -> None:
    # When "stays" comes, 20 MiB are free in either run; the wider one is needed whole later.
    trace = trace_of(
        ("a", 20), ("b", 20), ("a", 20), ("stays", 20), ("b", 20), ("wide", 40), ("wide", 40), ("stays", 20),
    )  # fmt: skip
    assert pool_bytes((40 * MIB, 20 * MIB), [trace]) == pool_bytes((20 * MIB, 40 * MIB), [trace]) == 100 * MIB


def test_what_the_pool_grew_by_serves_the_next_capture() -> None:
    assert pool_bytes((), [FRAGMENTING, FRAGMENTING]) == pool_bytes((), [FRAGMENTING])
    assert pool_bytes((), [FRAGMENTING.scaled(0.5), FRAGMENTING]) > pool_bytes((), [FRAGMENTING])


def test_small_allocations_and_growth_are_as_torch_makes_them() -> None:
    assert pool_bytes((), [trace_of(("a", 1), ("a", 1))]) == 0
    assert [segment_bytes(size * MIB) for size in (2, 9, 10, 11, 21)] == [size * MIB for size in (20, 20, 10, 12, 22)]


def test_more_than_the_limit_is_no_answer() -> None:
    assert pool_bytes((100 * MIB,), [], limit=99 * MIB) == float("inf")
    assert pool_bytes((), [FRAGMENTING], limit=FRAGMENTING.peak_bytes - 1) == float("inf")


def test_chosen_runs_need_less_and_are_always_the_same() -> None:
    traces = [FRAGMENTING.scaled(ratio) for ratio in (1.0, 0.75, 0.5, 0.25)]
    runs = choose_runs(traces)
    without = pool_bytes((), traces)
    assert FRAGMENTING.peak_bytes <= pool_bytes(runs, traces) <= without - packing._WORTHWHILE_BYTES
    assert choose_runs(traces) == runs


def test_little_to_gain_is_left_in_one_piece() -> None:
    slight = FRAGMENTING.scaled(0.1)
    assert choose_runs([slight]) == (pool_bytes((), [slight]),)
    assert choose_runs([trace_of(("a", 200), ("a", 200))]) == (200 * MIB,)


def test_small_allocations_come_from_no_run() -> None:
    assert choose_runs([]) == choose_runs([AllocationTrace(())]) == ()
    assert choose_runs([trace_of(("a", 1), ("b", 1), ("a", 1), ("b", 1))]) == ()


def test_a_long_trace_is_cut_between_tensors() -> None:
    layer = [(number, size) for number, size in FRAGMENTING.events]
    events = tuple((number + 10 * index, size) for index in range(1000) for number, size in layer)
    short = AllocationTrace((*((-1, MIB),), *events, *((-1, MIB),))).shortened()
    assert len(short.events) <= packing._MAX_EVENTS
    assert short.peak_bytes == FRAGMENTING.peak_bytes
    assert pool_bytes((), [short]) == pool_bytes((), [FRAGMENTING])
    assert all(sum(other == number for other, _ in short.events) == 2 for number, _ in short.events)
    assert FRAGMENTING.shortened() is FRAGMENTING


@given(seed=st.integers(0, 10_000), runs=st.lists(st.integers(2, 400), max_size=4))
def test_no_pool_is_smaller_than_what_is_in_use(seed: int, runs: list[int]) -> None:
    rng, live, events = random.Random(seed), [], []
    for number in range(40):
        if live and rng.random() < 0.5:
            events.append(live.pop(rng.randrange(len(live))))
        live.append((number, rng.randint(1, 300) * MIB))
        events.append(live[-1])
    trace = AllocationTrace((*events, *live))
    sizes = [run * MIB for run in runs]
    taken = pool_bytes(sizes, [trace])
    assert taken >= max(trace.peak_bytes, sum(sizes))
    assert pool_bytes(sizes, [trace, trace]) >= taken


def test_a_family_traces_its_captures(device: torch.device) -> None:
    x = torch.zeros(MIB, device=device)  # 4 MiB

    def fn() -> torch.Tensor:
        a = x + 1
        b = a * 2
        return a + b

    with PlanFamily(device) as family, torch.no_grad():
        family.capture(fn)
        with family.tracing() as events:
            family.capture(fn)
        family.capture(fn)
        sizes = [size for _, size in events]
    assert sizes.count(4 * MIB) == 2 * 3
    trace = AllocationTrace(tuple(events))
    assert trace.peak_bytes == 3 * 4 * MIB


@pytest.mark.parametrize("runs", [(24 * MIB,), (40 * MIB, 24 * MIB), (24 * MIB, 40 * MIB, 24 * MIB)])
def test_each_run_is_reserved_in_one_piece_and_only_once(device: torch.device, runs: tuple[int, ...]) -> None:
    with PlanFamily(device) as family:
        family.reserve(*runs)
        assert family.pool_bytes == sum(runs)
        family.reserve(*runs)
        assert family.pool_bytes == sum(runs)
