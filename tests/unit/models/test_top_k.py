"""The largest few of each row: the operator, and where a block's graph gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("triton")

from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from breakgraph.models.rewrites import BlockRewrites
from breakgraph.models.top_k import top_k
from triton_device import DEVICE

NUM_EXPERTS = 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 128, 8), (3, 60, 4), (1, 7, 7), (9, 1000, 6), (2, 1, 1)])
def test_the_largest_come_first(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_columns, k = shape
    wide = torch.randn(num_rows, num_columns + 3).to(DEVICE, dtype)
    for x in (wide[:, 2 : num_columns + 2], wide[:, :num_columns].t().contiguous().t()):
        values, indices = top_k(x, k, False)
        assert torch.equal(values, x.topk(k).values)
        assert torch.equal(x.gather(1, indices), values)
        values, indices = top_k(x, k, True)
        expected = x.float().softmax(-1)
        torch.testing.assert_close(values, expected.topk(k).values)
        torch.testing.assert_close(expected.gather(1, indices), values)


def test_equal_ones_go_by_their_columns_and_no_column_is_taken_twice() -> None:
    low = float("-inf")
    x = torch.tensor([[1.0, 2.0, 2.0, 1.0], [low, low, low, low], [low, 0.0, low, low]], device=DEVICE)
    values, indices = top_k(x, 3, False)
    assert indices.tolist() == [[1, 2, 0], [0, 1, 2], [1, 0, 2]]
    assert values.tolist() == [[2.0, 2.0, 1.0], [low] * 3, [0.0, low, low]]


def test_signs_and_sizes_are_in_order() -> None:
    x = torch.tensor([[-2.0, -0.0, 1e-40, 0.0, 3e38, -1e-40, float("inf"), -3e38, float("-inf"), 7.0]], device=DEVICE)
    values, indices = top_k(x, 10, False)
    assert indices.tolist() == [[6, 4, 9, 2, 1, 3, 5, 0, 7, 8]]
    assert values.tolist() == x.gather(1, indices).tolist()


def test_nan_is_the_largest() -> None:
    x = torch.tensor([[3.0, float("inf"), float("nan"), 5.0]], device=DEVICE)
    values, indices = top_k(x, 2, False)
    assert indices.tolist() == [[2, 1]]
    assert values[0, 0].isnan()
    assert values[0, 1] == float("inf")
    assert top_k(x[:, [0, 2, 3]], 2, True)[0].isnan().all()


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_shares_are_parts_of_the_sum_of_what_was_chosen(softmax: bool, dtype: torch.dtype | None) -> None:
    x = torch.rand(7, 20, device=DEVICE) + 0.1
    values, indices = top_k(x, 5, softmax)
    shares, same = top_k(x, 5, softmax, True, dtype)
    assert shares.dtype == (dtype or torch.float32)
    assert torch.equal(indices, same)
    torch.testing.assert_close(shares, (values / values.sum(-1, keepdim=True)).to(shares.dtype))


def test_no_rows() -> None:
    values, indices = top_k(torch.empty(0, 8, device=DEVICE), 2, True)
    assert values.shape == indices.shape == (0, 2)


Route = Callable[[Tensor], tuple[Tensor, Tensor]]


def of_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 4)
    return chosen / chosen.sum(-1, keepdim=True), index


def softmax_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen, index = torch.topk(logits, 4, dim=1, sorted=False)
    return chosen.softmax(-1), index


def of_softmax_that_is_read(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits, -1, dtype=torch.float32)
    chosen, index = torch.topk(scores, 4)
    return chosen + scores[:, :4], index


def of_softmax_over_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(torch.softmax(logits, 0, dtype=torch.float32), 4)


def of_something_like_it(logits: Tensor) -> tuple[Tensor, Tensor]:
    parts = (logits - logits.amin(-1, keepdim=True)).float().exp()
    return torch.topk(parts / parts.sum(-1, keepdim=True), 4)


def of_the_smallest(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(logits, 4, largest=False)


def of_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(logits, 4, dim=0)


def of_groups(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(logits.view(-1, 4, NUM_EXPERTS // 4), 2)


def of_many(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(logits.repeat(1, 50), 4)


def routed(route: Route, x: Tensor) -> tuple[fx.GraphModule, list[tuple[Any, ...]]]:
    """What becomes of a router's graph, and the arguments of each top_k behind the tensor."""
    module: fx.GraphModule = make_fx(
        lambda x: route(x.view(-1, NUM_EXPERTS)), select_decomp_table(), tracing_mode="symbolic"
    )(x)  # fmt: skip
    BlockRewrites()(module.graph)
    module.graph.lint()
    module.recompile()
    return module, [node.args[2:] for node in module.graph.nodes if node.target is top_k]


@pytest.mark.parametrize(("route", "softmax"), [
    (of_softmax, True), (softmax_of, False), (of_softmax_that_is_read, False), (of_softmax_over_tokens, False),
    (of_something_like_it, False), (of_the_smallest, None), (of_tokens, None), (of_groups, None), (of_many, None),
])  # fmt: skip
def test_what_the_graph_of_a_block_gets(route: Route, softmax: bool | None) -> None:
    module, found = routed(route, (torch.randn(6 * NUM_EXPERTS, device=DEVICE) * 2).half())
    assert [arguments[0] for arguments in found] == ([] if softmax is None else [softmax])
    assert softmax is not True or not module.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    for num_tokens in (6, 9):
        x = torch.randn(num_tokens * NUM_EXPERTS, device=DEVICE).half()
        got, expected = module(x), route(x.view(-1, NUM_EXPERTS))
        # Without sorted=True any order is right, and so is either of two equal ones.
        torch.testing.assert_close(got[0].sort().values, expected[0].sort().values, rtol=1e-3, atol=1e-3)
        assert (got[1].sort().values == expected[1].sort().values).float().mean() > 0.9


def shares(logits: Tensor, *, rounded: bool = True, total_of: int = 0, is_read: bool = False) -> tuple[Tensor, Tensor]:
    chosen, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 4)
    total = chosen.sum(-1 if total_of == 0 else 0, keepdim=True)
    share = chosen / total
    return (share.to(logits.dtype) if rounded else share) + (chosen if is_read else 0), index


@pytest.mark.parametrize(("options", "expected"), [
    ({}, (True, True, torch.float16)), ({"rounded": False}, (True, True, torch.float32)),
    ({"total_of": 1}, (True,)), ({"is_read": True}, (True,)),
])  # fmt: skip
def test_shares_are_taken_where_the_values_are_chosen(options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        return shares(logits, **options)

    x = (torch.randn(6 * NUM_EXPERTS, device=DEVICE) * 2).half()
    module, found = routed(route, x)
    assert found == [expected]
    torch.testing.assert_close(module(x)[0], route(x.view(-1, NUM_EXPERTS))[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_shares_of_a_sum_in_another_dtype_are_left_alone(dtype: torch.dtype) -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen, index = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 4)
        return chosen / chosen.sum(-1, keepdim=True, dtype=dtype), index

    x = (torch.randn(6 * NUM_EXPERTS, device=DEVICE) * 2).half()
    module, found = routed(route, x)
    assert found == [(True,)]
    got, expected = module(x)[0], route(x.view(-1, NUM_EXPERTS))[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
