"""Faults of ranks that capture and replay together. This file is also what each of two processes with gloo runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import breakgraph
from breakgraph.errors import (
    BreakgraphError,
    CaptureError,
    ConfigError,
    RankMismatchError,
    ReplayError,
    StalePlanError,
)
from breakgraph.graph import Plan, PlanFamily, break_graph, eager_on_graph

Case = Callable[[int, str, PlanFamily], Any]
OnTwoRanks = Callable[[Case], tuple[Any, Any]]
CASES: dict[str, Case] = {}
GROUPS: dict[str, dist.ProcessGroup] = {}
"""Of the case that runs: one for the family, one for the collectives in breaks."""


def case(fn: Case) -> Case:
    """What one rank does. What it returns, as JSON, is what the test sees."""
    CASES[fn.__name__] = fn
    return fn


def new_group(sec: float = 60) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=sec))


@eager_on_graph(mutates=("x",))
def sum_over_ranks(x: Tensor) -> None:
    dist.all_reduce(x, group=GROUPS["collectives"])


@eager_on_graph
def doubled(x: Tensor) -> Tensor:
    return x * 2


def summed(x: Tensor) -> Tensor:
    part = x * 2
    sum_over_ranks(part)
    return part + 1


def capture_sum(family: PlanFamily, device: str, rows: int, **options: Any) -> tuple[Plan, Tensor]:
    """A plan whose break adds up what the ranks hold, and its static input."""
    x = torch.ones(rows, device=device)
    return family.capture(lambda: summed(x), label=str(rows), **options), x


def sums(plan: Plan, x: Tensor, value: int) -> list[float]:
    x.fill_(value)
    return sorted(set(plan.replay().tolist()))


def text_of(error: type[BaseException], call: Callable[[], object]) -> str:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    return str(raised.value)


@case
def matched(rank: int, device: str, family: PlanFamily) -> Any:
    (large, x), (small, y) = (capture_sum(family, device, rows) for rows in (16, 8))
    with torch.inference_mode():
        first = sums(large, x, rank + 1)
    return [first, sums(small, y, rank + 3), sums(large, x, rank + 5)]


@case
def other_bucket(rank: int, device: str, family: PlanFamily) -> Any:
    plans = [capture_sum(family, device, rows) for rows in (16, 8)]
    (large, x), (small, _) = plans
    said = text_of(RankMismatchError, plans[1 - rank][0].replay)
    ran = [large.num_replays, small.num_replays]
    return said, ran, sums(large, x, rank + 1)


@case
def same_label(rank: int, device: str, family: PlanFamily) -> Any:
    x, y = (torch.ones(rows, device=device) for rows in (16, 8))
    with (
        breakgraph.capture(summed, x, group=GROUPS["family"]) as large,
        breakgraph.capture(summed, y, group=GROUPS["family"]) as small,
    ):
        said = text_of(RankMismatchError, (large, small)[rank].replay)
        return said, text_of(ConfigError, small.verify), small.replay().tolist()


@case
def capture_and_replay(rank: int, device: str, family: PlanFamily) -> Any:
    plan, x = capture_sum(family, device, 16)
    said = text_of(RankMismatchError, plan.replay if rank else lambda: capture_sum(family, device, 8))
    return said, sums(plan, x, rank + 1)


@case
def other_warm_up(rank: int, device: str, family: PlanFamily) -> Any:
    said = text_of(RankMismatchError, lambda: capture_sum(family, device, 8, warmup=rank + 1))
    return said, sums(*capture_sum(family, device, 8), rank + 1)


@case
def stale_on_one(rank: int, device: str, family: PlanFamily) -> Any:
    plan, _ = capture_sum(family, device, 8)
    if rank == 0:
        plan.invalidate()
    return text_of(RankMismatchError if rank else StalePlanError, plan.replay)


@case
def input_moved_on_one(rank: int, device: str, family: PlanFamily) -> Any:
    x = torch.ones(8, device=device)
    kept = x.data
    with breakgraph.capture(summed, x, group=GROUPS["family"]) as graph:
        if rank == 0:
            x.data = torch.ones(8, device=device)
        said = text_of(RankMismatchError if rank else StalePlanError, graph.replay)
        x.data = kept
        return said, graph.replay().tolist()


def _one_fails(rank: int, device: str, family: PlanFamily, failing_run: int) -> Any:
    x, runs = torch.ones(8, device=device), [0]

    def fn() -> Tensor:
        runs[0] += 1
        result = summed(x)
        if rank == 0 and runs[0] == failing_run:
            raise ZeroDivisionError("of its own")
        return result

    said = text_of(RankMismatchError if rank else ZeroDivisionError, lambda: family.capture(fn, label="fails"))
    num_plans = len(family._plans)
    return said, num_plans, sums(*capture_sum(family, device, 8), rank + 1)


@case
def fails_in_warm_up(rank: int, device: str, family: PlanFamily) -> Any:
    return _one_fails(rank, device, family, 1)


@case
def fails_in_capture(rank: int, device: str, family: PlanFamily) -> Any:
    return _one_fails(rank, device, family, 2)


@case
def other_structure(rank: int, device: str, family: PlanFamily) -> Any:
    x = torch.ones(8, device=device)

    def fn() -> Tensor:
        y = doubled(x + 1)
        if rank == 1:
            break_graph()
        return y + 1

    said = text_of(RankMismatchError, lambda: family.capture(fn))
    assert len(family._parked) == 2 + rank  # the graphs of a plan that was closed
    return said, len(family._plans), sums(*capture_sum(family, device, 8), rank + 1)


@case
def long_labels(rank: int, device: str, family: PlanFamily) -> Any:
    x = torch.ones(8, device=device)
    return text_of(RankMismatchError, lambda: family.capture(lambda: x + 1, label=f"{'é' * 400}{rank}"))


@case
def inside_a_break(rank: int, device: str, family: PlanFamily) -> Any:
    with PlanFamily(device, GROUPS["family"]) as other:
        inner, x = capture_sum(other, device, 8)

        @eager_on_graph
        def replays() -> tuple[Tensor, int]:
            return inner.replay().clone(), 3

        def fn() -> Tensor:
            made, number = replays()
            return made * number

        plan = family.capture(fn)
        return sums(plan, x, rank + 1)


@case
def never_arrives(rank: int, device: str, family: PlanFamily) -> Any:
    with PlanFamily(device, new_group(sec=1)) as alone:
        if rank == 1:
            return None
        with pytest.raises(RuntimeError) as raised:
            capture_sum(alone, device, 8)
        return isinstance(raised.value, BreakgraphError), getattr(raised.value, "__notes__", [])


def run_rank(device: str, store: str, rank: int) -> dict[str, Any]:
    """Every case, as one rank. A case that fails gives its traceback; the next has groups of its own."""
    results: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for name, fn in CASES.items():
        GROUPS.update(family=new_group(), collectives=new_group())
        try:
            with torch.no_grad(), PlanFamily(device, GROUPS["family"]) as family:
                results[name] = fn(rank, device, family)
        except BaseException:
            results[name] = traceback.format_exc()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def on_two_ranks(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> OnTwoRanks:
    """What each of two ranks gave for a case."""
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(device), (tmp_path_factory.mktemp("ranks") / "store").as_uri()]
    ranks = [subprocess.Popen([*command, str(rank)], env=environ, text=True, stdout=-1, stderr=-1) for rank in (0, 1)]
    try:
        ends = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors for _, errors in ends)
    first, second = (json.loads(out) for out, _ in ends)

    def results(fn: Case) -> tuple[Any, Any]:
        failed = [found for rank in (first, second) if "Traceback" in str(found := rank[fn.__name__])]
        assert not failed, "\n".join(failed)
        return first[fn.__name__], second[fn.__name__]

    return results


def test_f26_ranks_that_agree_replay_collectives(on_two_ranks: OnTwoRanks) -> None:
    # Each rank gives value * 2, the sum gets 1 added.
    assert on_two_ranks(matched) == ([[7.0], [15.0], [23.0]],) * 2


def test_f26_ranks_that_replay_other_buckets_raise_and_go_on(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(other_bucket)
    assert first == second
    said, ran, after = first
    assert "rank 0: replay 8, " in said
    assert "rank 1: replay 16, " in said
    assert ran == [0, 0]
    assert after == [7.0]


def test_f26_plans_of_one_label_are_told_apart(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(same_label)
    assert first == second
    said, checked, after = first
    assert "capture 1 of the group; rank 1:" in said
    assert "capture 2 of the group. " in said
    assert "group=" in checked
    assert after == [5.0] * 8


def test_f26_a_capture_beside_a_replay_raises(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(capture_and_replay)
    assert first == second
    assert "rank 0: capture 8 (" in first[0]
    assert "rank 1: replay 16, " in first[0]
    assert first[1] == [7.0]


def test_f26_captures_with_other_options_raise(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(other_warm_up)
    assert first == second
    assert "warmup=1" in first[0]
    assert "warmup=2" in first[0]
    assert first[1] == [7.0]


def test_f26_a_plan_that_is_stale_on_one_rank_does_not_replay_on_the_other(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(stale_on_one)
    assert "was invalidated" in first
    assert "rank 0: replay 8, which failed: StalePlanError" in second


def test_f26_an_input_that_moved_on_one_rank_stops_the_other(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(input_moved_on_one)
    assert "in other memory" in first[0]
    assert "rank 0: a replay, which failed: StalePlanError" in second[0]
    assert first[1] == second[1] == [5.0] * 8


@pytest.mark.parametrize("fn", [fails_in_warm_up, fails_in_capture])
def test_f26_a_capture_that_fails_on_one_rank_fails_on_all(on_two_ranks: OnTwoRanks, fn: Case) -> None:
    first, second = on_two_ranks(fn)
    assert first[0] == "of its own"
    assert "which failed: ZeroDivisionError: of its own" in second[0]
    for _, num_plans, after in (first, second):
        assert num_plans == 0
        assert after == [7.0]


def test_f26_captures_of_other_structure_raise_and_nothing_is_kept(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(other_structure)
    assert first == second
    said, num_plans, after = first
    assert "rank 0: keep 2 segments, breaks doubled x 1" in said
    assert "rank 1: keep 3 segments, breaks doubled x 1, break_graph" in said
    assert num_plans == 0
    assert after == [7.0]


def test_f26_long_names_that_differ_at_the_end_differ(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(long_labels)
    assert first == second
    assert "rank 1: capture é" in first


def test_f26_a_replay_in_a_break_of_another_capture_is_compared_too(on_two_ranks: OnTwoRanks) -> None:
    assert on_two_ranks(inside_a_break) == ([21.0], [21.0])


def test_f26_a_rank_that_never_arrives_leaves_the_error_of_the_group(on_two_ranks: OnTwoRanks) -> None:
    assert on_two_ranks(never_arrives) == ([False, []], None)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the only rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_f26_a_group_that_takes_no_host_tensors_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r'got cuda:gloo; .*dist\.new_group\(backend="gloo"\)'):
        PlanFamily(device, dist.new_group(backend="cuda:gloo"))
    with pytest.raises(ConfigError, match="a process group with this process in it"):
        PlanFamily(device, dist.GroupMember.NON_GROUP_MEMBER)
    with PlanFamily(device, dist.new_group(backend="cpu:gloo,cuda:gloo")) as family:
        x = torch.ones(4, device=device)
        assert family.capture(lambda: x + 1).replay().tolist() == [2.0] * 4


def test_f26_the_error_is_of_both_kinds() -> None:
    assert issubclass(RankMismatchError, CaptureError)
    assert issubclass(RankMismatchError, ReplayError)


if __name__ == "__main__":
    print(json.dumps(run_rank(*sys.argv[1:3], rank=int(sys.argv[3]))))
