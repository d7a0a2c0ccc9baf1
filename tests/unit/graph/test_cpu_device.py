"""What only the CPU device shows: reads of unwritten memory, undeclared writes, its own pool, host tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from breakgraph.errors import UncapturableOpError, UndeclaredWriteError, UnwrittenReadError
from breakgraph.graph import PlanFamily, eager_on_graph
from breakgraph.graph.cpu_pool import CpuPool


@pytest.fixture
def cpu() -> Iterator[PlanFamily]:
    with PlanFamily("cpu") as family, torch.no_grad():
        yield family


def test_a_segment_that_reads_what_it_never_wrote_is_refused(cpu: PlanFamily) -> None:
    x = torch.randn(4, 4)

    def half_written() -> Tensor:
        y = torch.empty_like(x)
        y[:2] = x[:2]
        return y.sum(0)

    with pytest.raises(UnwrittenReadError, match=r"aten\.sum"):
        cpu.capture(half_written)


def test_strided_writes_are_tracked_byte_by_byte(cpu: PlanFamily) -> None:
    x = torch.randn(4, 6)

    def columns(last: int) -> Tensor:
        y = torch.empty_like(x)
        y[:, 0::2] = x[:, 0::2]
        y[:, 1:last:2] = x[:, 1:last:2] * 2
        return y.t().contiguous()

    with pytest.raises(UnwrittenReadError):
        cpu.capture(lambda: columns(4))
    plan = cpu.capture(lambda: columns(6))
    cpu.poison()
    assert torch.equal(plan.replay(), columns(6))


def test_a_break_may_be_given_unwritten_rows_but_not_read_them(cpu: PlanFamily) -> None:
    x = torch.randn(4, 4)
    rows = {"read": 2}
    marked = eager_on_graph(lambda t: t[: rows["read"]].sum(0))

    def fn() -> Tensor:
        y = torch.empty_like(x)
        y[:2] = x[:2]
        return marked(y) + 1

    plan = cpu.capture(fn)
    assert torch.equal(plan.replay(), x[:2].sum(0) + 1)
    rows["read"] = 3
    with pytest.raises(UnwrittenReadError, match="in an eager break"):
        plan.replay()


def test_a_replay_that_skips_a_write_is_caught(cpu: PlanFamily) -> None:
    x, fill = torch.randn(4), {"now": True}

    @eager_on_graph(mutates=("out",))
    def into(t: Tensor, out: Tensor) -> None:
        if fill["now"]:
            out.copy_(t)

    def fn() -> Tensor:
        out = torch.empty_like(x)
        into(x, out)
        return out * 2

    plan = cpu.capture(fn)
    plan.replay()
    fill["now"] = False
    with pytest.raises(UnwrittenReadError, match=r"aten\.mul"):
        plan.replay()


def test_a_write_that_is_not_declared_is_an_error(cpu: PlanFamily) -> None:
    x = torch.randn(4)
    sneaky = eager_on_graph(lambda t: t.add_(1).clone())
    with pytest.raises(UndeclaredWriteError, match="mutates="):
        cpu.capture(lambda: sneaky(x * 1) + 1)


def test_host_scalars_are_baked_and_host_tensors_refused(cpu: PlanFamily) -> None:
    x = torch.randn(4)
    kept: list[Tensor] = []

    def scaled() -> Tensor:
        kept.append(torch.tensor(2.0))
        return x * (kept[-1] + 1)

    plan = cpu.capture(scaled)
    kept[-1].fill_(100.0)
    assert torch.equal(plan.replay(), x * 3)
    with pytest.raises(UncapturableOpError, match="mixes devices"):
        cpu.capture(lambda: x + torch.tensor([1.0, 2.0, 3.0, 4.0]))


@torch.library.custom_op("breakgraph_test::flip_into", mutates_args=("out",))
def flip_into(t: Tensor, out: Tensor) -> None:
    out.copy_(t.flip(0))


@torch.library.custom_op("breakgraph_test::flipped", mutates_args=())
def flipped(t: Tensor) -> Tensor:
    return t.flip(0)


def test_opaque_operators_run_with_or_without_a_meta_kernel(cpu: PlanFamily) -> None:
    x = torch.randn(4)

    def fn() -> Tensor:
        out = torch.empty_like(x)
        flip_into(x + 1, out)
        return flipped(out) * 2 + out

    plan = cpu.capture(fn)
    x.copy_(torch.randn(4))
    cpu.poison()
    assert torch.equal(plan.replay(), fn())


def test_in_place_updates_of_outside_tensors_happen_once_a_replay(cpu: PlanFamily) -> None:
    x, total = torch.ones(3), torch.zeros(3)
    plan = cpu.capture(lambda: total.add_(x).clone(), state=(total,))
    assert [plan.replay().tolist() for _ in range(2)] == [[1.0] * 3, [2.0] * 3]


@given(st.lists(st.tuples(st.integers(1, 5_000_000), st.integers(0, 20)), min_size=1, max_size=60))
def test_live_blocks_never_overlap_and_freed_ones_are_reused(plan: list[tuple[int, int]]) -> None:
    """Allocate, and at each step free one of the live blocks: what is live stays disjoint, aligned and in the pool."""
    pool = CpuPool()
    live: list[Tensor] = []
    for nbytes, victim in plan:
        live.append(pool.empty_strided(torch.Size([nbytes]), (1,), torch.uint8, nbytes))
        if victim < len(live):
            del live[victim]
        blocks = pool.live_blocks()
        assert len(blocks) == len(live)
        assert all(a.address + a.nbytes <= b.address for a, b in pairwise(blocks))
        assert all(t.data_ptr() % 512 == 0 and pool.owns(t.data_ptr()) for t in live)
    live.clear()
    assert pool.live_blocks() == []
    assert pool.poison() == pool.reserved_bytes
    reserved = pool.reserved_bytes
    pool.empty_strided(torch.Size([1]), (1,), torch.uint8, max(n for n, _ in plan))
    assert pool.reserved_bytes == reserved


def test_a_block_is_reused_while_a_view_still_shows_it() -> None:
    pool = CpuPool()
    first = pool.empty_strided(torch.Size([100]), (1,), torch.float32, 400)
    address = first.data_ptr()
    view = pool.view_storage(first.untyped_storage())
    del first
    again = pool.empty_strided(torch.Size([100]), (1,), torch.float32, 400)
    assert again.data_ptr() == address == view.data_ptr()
