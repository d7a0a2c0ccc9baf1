"""Compiled blocks on a GPU: which kernels run, and that the numbers are those of the plain model."""

from __future__ import annotations

import pytest
import torch

from breakgraph.attention import make_attention
from breakgraph.bench.profiler import profiled
from breakgraph.models import HFModel, fuse
from breakgraph.models.experts import TRITON
from breakgraph.models.few_rows import MAX_ROWS, add_product, few_rows_product
from breakgraph.models.support import has_experts
from packed_driver import CountingDriver, PackedDriver, TokenSequence
from tiny_models import TINY_CONFIGS, VOCAB_SIZE, tiny_config, tiny_model

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
"""Over the largest logit: compiled code rounds less often."""


def driver_of(
    name: str, fused: bool, device: torch.device, dtype: torch.dtype = torch.bfloat16, experts: str = "batched_mm",
    driver: type[PackedDriver] = PackedDriver,
) -> PackedDriver:  # fmt: skip
    model = HFModel(tiny_model(name, "breakgraph", experts=experts).to(device, dtype), name)
    if fused:
        fuse(model)
    return driver(model, make_attention("sdpa", device, dtype, model.layers))


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_architecture_gives_nearly_the_same_numbers(name: str, device: torch.device) -> None:
    """With experts in float32: in bfloat16 a rounding decides which of two experts a token goes to."""
    torch._dynamo.reset()
    dtype = torch.float32 if has_experts(tiny_config(name)) else torch.bfloat16
    plain, fused = (driver_of(name, fused, device, dtype) for fused in (False, True))
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist() for count in (12, 7)]
    for driver in (plain, fused):
        driver.work = [TokenSequence(list(one)) for one in tokens]
    for counts, padding, phase in (((9, 5), 3, "prefill"), ((2, 1), 4, "prefill"), ((1, 1), 2, "decode")):
        steps = [
            driver.step(list(zip(driver.work, counts, strict=True)), padding=padding, phase=phase)
            for driver in (plain, fused)
        ]
        for one, other in zip(*steps, strict=True):
            assert (one - other).abs().max() <= TOLERANCE[dtype] * one.abs().max()


def test_heads_are_turned_in_one_kernel_and_products_added_in_place(device: torch.device) -> None:
    torch._dynamo.reset()
    driver = driver_of("qwen3", True, device)
    sequence = TokenSequence([1] * 40)
    driver.step([(sequence, 9)])
    events = profiled(lambda: driver.step([(sequence, 9)]), device, host=False)
    names = [event.name for event in events]
    assert sum("norm_rope" in name for name in names) == len(driver.model.layers)
    # Of the two sums of a layer, that with the layer's input is left to Inductor, which makes it a part of the norm.
    assert not any(name.startswith("triton_poi") and "add" in name for name in names)


def test_products_of_few_rows_run_in_our_kernels_and_others_in_cublas(device: torch.device) -> None:
    torch._dynamo.reset()
    driver = driver_of("qwen3", True, device)
    products = 4 * len(driver.model.layers) + 1
    for count, vectors, matrices in ((1, products, 0), (9, 0, products), (MAX_ROWS + 1, 0, 0)):
        first, second = (TokenSequence([1] * count) for _ in range(2))
        driver.step([(first, count)])
        events = profiled(lambda second=second, count=count: driver.step([(second, count)]), device, host=False)
        names = [event.name for event in events]
        assert sum(name.startswith("vector_kernel") for name in names) == vectors
        assert sum(name.startswith("matrix_kernel") for name in names) == matrices


@pytest.mark.parametrize("num_rows", [1, 2, 16, MAX_ROWS])
@pytest.mark.parametrize("num_columns", [8192, 8250])
def test_products_of_few_and_of_many_columns_have_their_bits_in_every_replay(
    num_columns: int, num_rows: int, device: torch.device
) -> None:
    """With the tiles that models of usual size get, and whose shared memory this GPU has."""
    x, weight = (torch.randn(rows, 1100, device=device).bfloat16() for rows in (num_rows, num_columns))
    before = torch.randn(num_rows, num_columns, device=device).bfloat16()
    expected = x.double() @ weight.double().t()
    wanted = few_rows_product(x, weight)
    torch.testing.assert_close(wanted.double(), expected, rtol=0.005, atol=0.01)
    total = before.clone()
    add_product(total, x, weight.t())
    torch.testing.assert_close(total.double(), expected + before.double(), rtol=0.005, atol=0.01)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = few_rows_product(x, weight)
        replayed = before.clone()
        add_product(replayed, x, weight.t())
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)
        assert torch.equal(replayed, total)


@pytest.mark.parametrize("driver", [PackedDriver, CountingDriver])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_our_experts_give_nearly_the_same_numbers(
    name: str, driver: type[PackedDriver], device: torch.device
) -> None:  # fmt: skip
    torch._dynamo.reset()
    drivers = [driver_of(name, fused, device, torch.float32, TRITON, driver) for fused in (False, True)]
    works = [[TokenSequence(list(range(count))) for count in (12, 7)] for _ in drivers]
    for counts, padding, phase in (((9, 5), 3, "prefill"), ((2, 1), 4, "prefill"), ((1, 1), 2, "decode")):
        steps = [
            driven.step(list(zip(work, counts, strict=True)), padding=padding, phase=phase)
            for driven, work in zip(drivers, works, strict=True)
        ]
        for one, other in zip(*steps, strict=True):
            assert (one - other).abs().max() <= TOLERANCE[torch.float32] * one.abs().max()


@pytest.mark.parametrize("driver", [PackedDriver, CountingDriver])
def test_experts_add_the_residual_in_their_last_kernel(driver: type[PackedDriver], device: torch.device) -> None:
    torch._dynamo.reset()
    driven = driver_of("qwen3_moe", True, device, experts=TRITON, driver=driver)
    sequence = TokenSequence([1] * 40)
    driven.step([(sequence, 9)], padding=3)
    events = profiled(lambda: driven.step([(sequence, 9)], padding=3), device, host=False)
    names = [event.name for event in events]
    for kernel in ("combine_kernel", "up_kernel", "down_kernel", "group_kernel", "_top_k_kernel"):
        assert sum(name.startswith(kernel) for name in names) == len(driven.model.layers)
    assert not any(name.startswith("triton_poi") and "add" in name for name in names)
