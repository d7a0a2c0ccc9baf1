"""Rewrites of a block's graph: what they find, what they leave alone, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("triton")

from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from breakgraph.models.expert_ops import added_experts, gated_experts
from breakgraph.models.norm_rope import norm_rope, norm_rope_pair
from breakgraph.models.rewrites import BlockRewrites
from triton_device import DEVICE

HEAD_DIM = 16
Function = Callable[..., Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def rewritten(fn: Function, *args: Tensor) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(lambda *args: fn(*args), select_decomp_table(), tracing_mode="symbolic")(*args)
    BlockRewrites()(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def count(module: fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in module.graph.nodes)


def reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    heads = x.double()
    heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    half = heads.shape[-1] // 2
    cos, sin = (angles.double().transpose(1, 2) for angles in (cos, sin))
    return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin


@pytest.mark.parametrize("head_dim", [2, 16, 128])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 1), (5, 3), (9, 4)])
def test_heads_are_normalised_and_turned(num_tokens: int, num_heads: int, head_dim: int) -> None:
    wide = random(1, num_tokens, num_heads + 2, head_dim, dtype=torch.float32)
    x, weight = wide[:, :, 1 : num_heads + 1], random(head_dim, dtype=torch.float32)
    cos, sin = (random(1, 1, num_tokens, head_dim, dtype=torch.float32) for _ in range(2))
    for eps in (1e-6, 0.5):
        out = norm_rope(x, weight, cos, sin, eps)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), reference(x, weight, cos, sin, eps), rtol=1e-5, atol=1e-5)


def test_heads_that_lie_anywhere() -> None:
    x = random(1, 3, HEAD_DIM, 6, dtype=torch.float32).transpose(2, 3)
    args = (random(2 * HEAD_DIM, dtype=torch.float32)[::2], *(random(1, 1, 3, HEAD_DIM, dtype=torch.float32),) * 2, 0.1)
    torch.testing.assert_close(norm_rope(x, *args).double(), reference(x, *args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_tokens", "heads"), [(1, (1, 1)), (5, (8, 2)), (9, (4, 7)), (3, (2, 40))])
def test_two_are_turned_in_one_kernel_as_each_alone(num_tokens: int, heads: tuple[int, int]) -> None:
    wide = random(1, num_tokens, sum(heads), HEAD_DIM)
    x, other = wide.split(heads, 2)
    weights = random(2, HEAD_DIM)
    cos, sin = (random(1, 1, num_tokens, HEAD_DIM) for _ in range(2))
    both = norm_rope_pair(x, weights[0], 1e-6, other, weights[1], 0.5, cos, sin)
    alone = norm_rope(x, weights[0], cos, sin, 1e-6), norm_rope(other, weights[1], cos, sin, 0.5)
    for one, expected in zip(both, alone, strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, expected)


def attention_input(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, half: int = HEAD_DIM // 2
) -> Tensor:  # fmt: skip
    """As `transformers` writes it; tokens of x in one row each."""
    return turn(normalised(x, weight), cos.unsqueeze(1), sin.unsqueeze(1), half)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    heads = x.view(1, x.shape[0], -1, HEAD_DIM)
    wide = heads.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight * wide.to(x.dtype)).transpose(1, 2)


def turn(heads: Tensor, cos: Tensor, sin: Tensor, half: int = HEAD_DIM // 2) -> Tensor:
    first, second = heads[..., :half], heads[..., half:]
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos + turned * sin


def attention_args(num_tokens: int) -> tuple[Tensor, ...]:
    angles = (random(1, num_tokens, HEAD_DIM) for _ in range(2))
    return random(num_tokens, 3 * HEAD_DIM), random(HEAD_DIM), *angles


def test_the_heads_of_transformers_are_found() -> None:
    module = rewritten(attention_input, *attention_args(7))
    assert count(module, norm_rope) == 1
    assert count(module, torch.ops.aten.cat.default) == 0
    for num_tokens in (7, 4):
        args = attention_args(num_tokens)
        torch.testing.assert_close(module(*args), attention_input(*args), rtol=1e-2, atol=1e-2)


def queries_and_keys(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Both turned by the same angles."""
    queries, keys = x.split([2 * HEAD_DIM, HEAD_DIM], -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = turn(normalised(queries, weight), cos, sin).tanh()
    return turned + turn(normalised(keys + 1, weight * 2), cos, sin)


def one_after_the_other(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The second turns what the first gives."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first = turn(normalised(x, weight), cos, sin)
    return turn(normalised(first.transpose(1, 2).reshape(x.shape), weight), cos, sin)


def by_other_angles(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = normalised(x, weight)
    return turn(heads, cos.unsqueeze(1), sin.unsqueeze(1)) + turn(
        normalised(x * 2, weight), sin.unsqueeze(1), cos.unsqueeze(1)
    )


@pytest.mark.parametrize(("fn", "pairs", "alone"), [
    (queries_and_keys, 1, 0), (one_after_the_other, 0, 2), (by_other_angles, 0, 2),
])  # fmt: skip
def test_heads_with_the_same_angles_are_turned_together(fn: Function, pairs: int, alone: int) -> None:
    args = attention_args(7)
    module = rewritten(fn, *args)
    assert (count(module, norm_rope_pair), count(module, norm_rope)) == (pairs, alone)
    for num_tokens in (7, 4):
        args = attention_args(num_tokens)
        torch.testing.assert_close(module(*args), fn(*args), rtol=3e-2, atol=3e-2)


def in_unequal_parts(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return attention_input(x, weight, cos, sin, half=4)


def with_one_turn_for_all(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return attention_input(x, weight, cos[:, :1], sin[:, :1])


def with_one_weight_for_all(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return attention_input(x, weight[:1], cos, sin)


@pytest.mark.parametrize("fn", [in_unequal_parts, with_one_turn_for_all, with_one_weight_for_all])
def test_what_only_looks_like_them_is_left_alone(fn: Function) -> None:
    args = attention_args(7)
    module = rewritten(fn, *args)
    assert count(module, norm_rope) == 0
    torch.testing.assert_close(module(*args), fn(*args))


def with_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total = total + 1
    return total.sin() * 0.1 + (total + (left @ right).view(total.shape))


def product_first(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (left @ right).view(total.shape) + (total + 1)


def an_argument(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return total + (left @ right).view(total.shape)


def read_afterwards(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total = total + 1
    return (total + (left @ right).view(total.shape)) * total


def seen_by_a_view(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    total = total + 1
    row = total[:, 0]
    return (total + (left @ right).view(total.shape)) * row[:, None]


def given_out(total: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    total = total + 1
    return total, total + (left @ right).view(total.shape)


def read_twice(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    product = (left @ right).view(total.shape)
    return (total + 1 + product) * product


def spread(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (total[:, :1] + 1) + (left @ right).view(total.shape)


def in_wider_rows(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (total.view(1, 4, 14) + 1) + (left @ right).view(1, 4, 14)


def one_row_for_all(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (total + 1) + (left[:1] @ right)


def in_another_type(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return (total.double() + 1) + (left @ right).view(total.shape)


@pytest.mark.parametrize(("fn", "found"), [
    (in_wider_rows, 0), (one_row_for_all, 0), (in_another_type, 0),
    (with_product, 1), (product_first, 1), (an_argument, 0), (read_afterwards, 0), (seen_by_a_view, 0), (given_out, 0),
    (read_twice, 0), (spread, 0),
])  # fmt: skip
def test_products_are_added_in_place_where_nobody_sees(fn: Function, found: int) -> None:
    args = (random(1, 7, 8), random(7, 6), random(6, 8))
    module = rewritten(fn, *args)
    updates = module.graph.find_nodes(op="call_function", target=auto_functionalized)
    assert len(updates) == found
    # Inductor does not fuse what is updated with what reads it.
    assert all(list(node.kwargs["x"].users) == [node] for node in updates)
    before = [arg.clone() for arg in args]
    torch.testing.assert_close(module(*args), fn(*args), rtol=1e-2, atol=1e-2)
    assert all(torch.equal(arg, old) for arg, old in zip(args, before, strict=True))


Experts = Callable[[Tensor], Tensor]


def behind(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return residual + experts(x).reshape(residual.shape)


def in_front(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return (experts(x).view(residual.shape) + residual * 2).tanh()


def added_again_and_read(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    total = residual + experts(x).view(residual.shape)
    return (total + 1) * total


def with_shared(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return residual + (experts(x) + x.sin()).reshape(residual.shape)


def experts_read_twice(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    parts = experts(x)
    return (residual + parts.view(residual.shape)) * parts.view(residual.shape)


def to_itself(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    parts = experts(x).view(residual.shape)
    return parts + parts


def a_number(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return experts(x) + 1.5


def weighted(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return torch.add(residual, experts(x).view(residual.shape), alpha=2)


def of_another_dtype(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return residual.float() + experts(x).view(residual.shape)


def one_row_for_all(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return residual[:, :1] + experts(x).view(residual.shape)


def given_out_alone(residual: Tensor, x: Tensor, experts: Experts) -> Tensor:
    return experts(x)


@pytest.mark.parametrize("num_live", [None, 4])
@pytest.mark.parametrize(("fn", "found"), [
    (behind, 1), (in_front, 1), (added_again_and_read, 1), (with_shared, 0), (experts_read_twice, 0), (to_itself, 0),
    (a_number, 0), (weighted, 0), (of_another_dtype, 0), (one_row_for_all, 0), (given_out_alone, 0),
])  # fmt: skip
def test_experts_add_what_is_added_to_them_alone(
    fn: Callable[[Tensor, Tensor, Experts], Tensor], found: int, num_live: int | None
) -> None:
    live = [] if num_live is None else [torch.tensor([num_live], dtype=torch.int32, device=DEVICE)]
    weights = random(3, 12, 8), random(3, 8, 6), *live

    def block(residual: Tensor, x: Tensor, index: Tensor, choice: Tensor, *rest: Tensor) -> Tensor:
        gate_up, down, *live = rest
        return fn(residual, x, lambda x: gated_experts(x, gate_up, down, index, choice, live[0] if live else None))

    def args_of(rows: int) -> tuple[Tensor, ...]:
        index = torch.randint(3, (rows, 2), device=DEVICE)
        return random(1, rows, 8), random(rows, 8), index, random(rows, 2), *weights

    module = rewritten(block, *args_of(7))
    assert (count(module, added_experts), count(module, gated_experts)) == (found, 1 - found)
    for rows in (7, 5):
        args = args_of(rows)
        assert torch.equal(module(*args), block(*args))
