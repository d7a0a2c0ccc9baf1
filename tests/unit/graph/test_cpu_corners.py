"""The CPU device and its pool: corners that mutating them showed no other test to hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from breakgraph.errors import (
    PoolLeakError,
    UncapturableOpError,
    UnwrittenReadError,
)
from breakgraph.graph import PlanFamily, eager_on_graph
from breakgraph.graph.cpu_pool import CpuPool


@torch.library.custom_op("breakgraph_test::add_and_copy", mutates_args=("total",))
def add_and_copy(t: Tensor, total: Tensor) -> Tensor:
    total.add_(t)
    return total.clone()


def block(pool: CpuPool, nbytes: int) -> Tensor:
    return pool.empty_strided(torch.Size([nbytes]), (1,), torch.uint8, nbytes)


@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: y.add_(x),  # reads what it updates
        lambda y, x: (y[:, 0].copy_(x[:, 0]), y[-1].copy_(x[-1])),  # a column and a row: the extent, not the bytes
    ],
)
def test_what_is_not_wholly_written_is_refused(write: Callable[[Tensor, Tensor], object]) -> None:
    x = torch.randn(4, 4)

    def fn() -> Tensor:
        y = torch.empty_like(x)
        write(y, x)
        return y.sum(0)

    with torch.no_grad(), PlanFamily("cpu") as family, pytest.raises(UnwrittenReadError):
        family.capture(fn)


def test_what_a_copy_leaves_open_stays_open() -> None:
    x = torch.randn(4)

    def fn() -> Tensor:
        half = torch.empty(8)
        half[:4] = x
        return torch.empty(8).copy_(half) * 2

    with torch.no_grad(), PlanFamily("cpu") as family, pytest.raises(UnwrittenReadError):
        family.capture(fn)


def test_scattered_rows_count_as_written() -> None:
    x, rows = torch.randn(4, 4), torch.tensor([2, 0, 3, 1])

    def fn() -> Tensor:
        y = torch.empty_like(x)
        y[rows] = x
        return y * 2

    with torch.no_grad(), PlanFamily("cpu") as family:
        assert torch.equal(family.capture(fn).replay(), fn())


def test_host_tensors_stay_on_the_host() -> None:
    x, kept = torch.randn(2), []

    def baked() -> Tensor:
        kept.append(torch.tensor(3.0))
        return x * kept[-1]

    with torch.no_grad(), PlanFamily("cpu") as family:
        plan = family.capture(baked)
        kept[-1].fill_(100.0)
        assert torch.equal(plan.replay(), x * 3)
        with pytest.raises(UncapturableOpError, match="mixes devices"):
            family.capture(lambda: x + torch.tensor([1.0, 2.0]) * 2)


@pytest.mark.parametrize("read", [lambda y: y.numpy(), np.asarray, np.from_dlpack])
def test_numpy_is_the_host(read: Callable[[Tensor], object]) -> None:
    x = torch.randn(4)
    with torch.no_grad(), PlanFamily("cpu") as family, pytest.raises(UncapturableOpError, match="to the host"):
        family.capture(lambda: (lambda y: (read(y), y)[1])(x + 1))


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_byte_masks_are_masks() -> None:
    x = torch.ones(4)
    with torch.no_grad(), PlanFamily("cpu") as family, pytest.raises(UncapturableOpError, match="boolean mask"):
        family.capture(lambda: x[(x > 0).byte()])


def test_conjugated_arguments_of_operators() -> None:
    x, w = torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64)
    with torch.no_grad(), PlanFamily("cpu") as family:
        assert torch.equal(family.capture(lambda: x.conj().mm(w)).replay(), x.conj().mm(w))


def test_an_opaque_operator_is_not_run_on_real_data_to_learn_its_shapes() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    with torch.no_grad(), PlanFamily("cpu") as family:
        family.capture(lambda: add_and_copy(x, total))
    assert total.tolist() == [2.0] * 3  # the warm-up and the capture's own run


def test_a_leak_in_a_cache_or_closure_is_named(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    warm = iter([True])

    @functools.lru_cache
    def table() -> Tensor:
        return torch.zeros(4, device=device) + 1

    with torch.no_grad(), pytest.raises(PoolLeakError, match=r"the cache of .*table\(\)"):
        family.capture(lambda: x if next(warm, False) else x + table())
    table.cache_clear()

    cell: Tensor | None = None
    again = iter([True])

    def fn() -> Tensor:
        nonlocal cell
        if not next(again, False):
            cell = x * 2
        return x + 1

    with torch.no_grad(), pytest.raises(PoolLeakError, match="a closure"):
        family.capture(fn)
    assert cell is not None


def test_the_smallest_block_that_fits_is_taken_and_the_exact_one_first() -> None:
    pool = CpuPool()
    held = [block(pool, n) for n in (4096, 512, 512, 512, 1024, 512)]
    large, small, middle = held[0].data_ptr(), held[2].data_ptr(), held[4].data_ptr()
    del held[4], held[2], held[0]
    taken = [block(pool, n) for n in (500, 700, 1100)]
    assert [t.data_ptr() for t in taken] == [small, middle, large]


@pytest.mark.parametrize(("arena", "whole", "part"), [(2 << 20, 1 << 20, 1 << 18), (20 << 20, 20 << 20, 5 << 20)])
def test_freed_neighbours_become_one_block(arena: int, whole: int, part: int) -> None:
    pool = CpuPool()
    parts = [block(pool, part) for _ in range(4)]
    address = parts[0].data_ptr()
    assert pool.reserved_bytes == arena
    for victim in (2, 0, 1, 0):
        del parts[victim]
    assert block(pool, whole).data_ptr() == address
    assert pool.reserved_bytes == arena


def test_small_and_large_blocks_share_no_arena() -> None:
    pool = CpuPool()
    large = block(pool, 30 << 20)
    del large
    small = block(pool, 1 << 20)
    assert pool.reserved_bytes == (30 << 20) + (2 << 20)
    # What is left of a large run is kept with the block where it is no larger than a small one.
    kept = block(pool, 29 << 20)
    assert sum(b.nbytes for b in pool.live_blocks()) == (1 << 20) + (30 << 20)
    del small, kept


def test_poison_reaches_free_bytes_and_no_others() -> None:
    pool = CpuPool()
    live, freed = block(pool, 512).fill_(1), block(pool, 512).fill_(1)
    view = torch.empty(0, dtype=torch.uint8).set_(pool.view_storage(freed.untyped_storage()))
    del freed
    assert pool.poison() == pool.reserved_bytes - 512
    assert view.tolist() == [255] * 512
    assert live.tolist() == [1] * 512


def test_every_arena_forgets_what_was_written() -> None:
    pool = CpuPool()
    spans = [pool.span(tensor) for tensor in (block(pool, 512), block(pool, 30 << 20))]
    for span in spans:
        assert span is not None
        pool.mark_written(span)
        assert pool.is_written(span)
    pool.begin_replay()
    assert not any(pool.is_written(span) for span in spans if span is not None)


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d, torch.nn.BatchNorm2d])
def test_what_a_cpu_leaves_out_of_a_result_is_not_missed(layer: type[torch.nn.Module]) -> None:
    """Normalising a batch in evaluation gives its statistics as empty tensors on a CPU."""
    norm = layer(4).eval()
    norm.running_mean.uniform_()
    x = torch.randn(3, 4) if layer is torch.nn.BatchNorm1d else torch.randn(2, 4, 3, 3)
    with torch.no_grad(), PlanFamily("cpu") as family:
        plan = family.capture(lambda: norm(x) * 2)
        x.normal_()
        assert torch.equal(plan.replay(), norm(x) * 2)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_code_that_enters_inference_mode_around_a_break(outer: Callable[[], Any]) -> None:
    double = eager_on_graph(lambda t: t * 2)
    x = torch.randn(3)

    def fn() -> Tensor:
        y = x + 1
        with torch.inference_mode():
            z = double(y * 3) + 1
        return z * 2

    with outer(), PlanFamily("cpu") as family:
        plan = family.capture(fn)
        x.copy_(torch.randn(3))
        assert torch.equal(plan.replay(), fn())


@torch.library.custom_op("breakgraph_test::halve_any", mutates_args=())
def halve_any(t: Tensor) -> Tensor:
    return t / 2


@halve_any.register_fake
def _(t: Tensor) -> Tensor:
    torch._check(t.dtype == torch.bfloat16, lambda: "expected bfloat16")
    return torch.empty_like(t)


def test_a_meta_kernel_that_takes_less_than_the_kernel() -> None:
    x = torch.randn(3)
    with torch.no_grad(), PlanFamily("cpu") as family:
        plan = family.capture(lambda: halve_any(x) + 1)
        x.normal_()
        assert torch.equal(plan.replay(), x / 2 + 1)


def test_what_follows_a_convolution_finds_its_layout() -> None:
    """Channels last: a reduction adds up in another order then."""
    layer = torch.nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    strides = []

    def fn() -> Tensor:
        out = layer(x)
        strides.append(out.stride())
        return out.mean((-2, -1))

    with torch.no_grad(), PlanFamily("cpu") as family:
        assert torch.equal(family.capture(fn).replay(), fn())
    assert len(set(strides)) == 1
