"""Products of few rows with a weight: the kernels against float64, and who computes which product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx, nn

pytest.importorskip("triton")

from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from breakgraph.attention import make_attention
from breakgraph.models import HFModel, few_rows, fuse, fusion
from breakgraph.models.expert_ops import added_experts, gated_experts
from breakgraph.models.experts import TRITON
from breakgraph.models.few_rows import MAX_ROWS, Tile, add_product, few_rows_product, multiply, takes, tile_for
from breakgraph.models.norm_rope import norm_rope_pair
from breakgraph.models.rewrites import BlockRewrites
from breakgraph.models.top_k import top_k
from packed_driver import CountingDriver, TokenSequence
from tiny_models import tiny_model
from triton_device import DEVICE

aten = torch.ops.aten
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter cannot multiply bfloat16."""
TILES = {"small": Tile(16, 32, 2, 3), "wide": Tile(32, 128, 4, 4)}
SHAPES = [(64, 96), (24, 130), (75, 33), (1, 1)]
"""Columns and width: of whole blocks, and not."""


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_product(out: Tensor, x: Tensor, weight: Tensor, before: Tensor | None = None) -> None:
    """Sums in float32, rounded once."""
    x, weight = x.double(), weight.double()
    expected = x @ weight.t() + (0 if before is None else before.double())
    slack = 1e-6 * (x.abs() @ weight.abs().t() + expected.abs()) + torch.finfo(out.dtype).eps * expected.abs() / 1.99
    assert out.isfinite().all()
    assert ((out.double() - expected).abs() <= slack).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles_of_any_size_give_the_product(tile: Tile, shape: tuple[int, int]) -> None:
    num_columns, width = shape
    for num_rows in (1, 2, 15, 16, 17, 32):
        for dtype in {DTYPE, torch.float16}:
            wide = random(num_rows, width + 8, dtype=dtype)
            x, weight = wide[:, 3 : width + 3], random(num_columns, width, dtype=dtype)
            out = torch.full((num_rows, num_columns), float("nan"), device=DEVICE, dtype=dtype)
            multiply(out, x, weight, tile=tile)
            assert_product(out, x, weight)
            before = random(num_rows, num_columns, dtype=dtype)
            out = before.clone()
            multiply(out, x, weight, add=True, tile=tile)
            assert_product(out, x, weight, before)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize(("num_columns", "width"), [(384, 256), (256, 768), (130, 72)])
def test_the_operators_give_the_product_of_any_number_of_rows(num_rows: int, num_columns: int, width: int) -> None:
    x, weight = random(num_rows, width), random(num_columns, width)
    out, before = few_rows_product(x, weight), random(1, num_rows, num_columns)
    assert out.is_contiguous()
    total = before.clone()
    add_product(total, x, weight.t())
    if num_rows in (0, MAX_ROWS + 1):
        assert torch.equal(out, torch.mm(x, weight.t()))
        assert torch.equal(total[0], before[0].addmm(x, weight.t()))
    else:
        assert_product(out, x, weight)
        assert_product(total[0], x, weight, before[0])


@pytest.mark.parametrize("num_rows", [1, 4])
def test_only_what_fits_is_multiplied_and_only_what_is_added_to_is_written(num_rows: int) -> None:
    x, weight = random(num_rows, 16), random(24, 16)
    with pytest.raises(RuntimeError, match="shapes"):
        few_rows_product(x, random(24, 8))
    wide = random(2 * num_rows, 48)
    before = wide.clone()
    total = wide[::2, :24]
    add_product(total, x, weight.t())
    if num_rows == 1:
        assert_product(total, x, weight, before[::2, :24])
    else:  # rows that are not dense are left to torch
        assert torch.equal(total, before.clone()[::2, :24].addmm_(x, weight.t()))
    total.copy_(before[::2, :24])
    assert torch.equal(wide, before)


def test_rows_above_the_limit_and_other_dtypes_are_left_to_torch() -> None:
    weight = random(24, 16)
    x = random(MAX_ROWS + 1, 16)
    assert takes(x[1:], weight)
    assert not takes(x, weight)
    assert not takes(x[:0], weight)
    assert not takes(x[1:], random(16, 24).t())
    assert not takes(random(16, 4).t(), weight)
    assert not takes(x[1:].float(), weight.float())
    assert not takes(x[1:], weight.float())
    assert takes(x[1:].bfloat16(), weight.bfloat16())
    for rows, other in ((x, weight), (random(16, 4).t(), weight), (x[1:].float(), weight.float())):
        assert torch.equal(few_rows_product(rows, other), torch.mm(rows, other.t()))
        total = torch.ones(1, len(rows), 24, device=DEVICE, dtype=rows.dtype)
        expected = total[0].addmm(rows, other.t())
        add_product(total, rows, other.t())
        assert torch.equal(total[0], expected)


@pytest.mark.parametrize("num_rows", [2, 17, MAX_ROWS])
def test_a_row_has_its_bits_whatever_the_others_are(num_rows: int) -> None:
    x, weight = random(num_rows, 200), random(40, 200)
    out = few_rows_product(x, weight)
    for row in (0, num_rows - 1):
        strange = torch.full_like(x, float("nan"))
        strange[row] = x[row]
        assert torch.equal(few_rows_product(strange, weight)[row], out[row])
    assert torch.equal(few_rows_product(x.flip(0), weight), out.flip(0))
    assert torch.equal(few_rows_product(x, weight), out)


@pytest.mark.parametrize(("has_large_memory", "kilobytes"), [(True, 224), (False, 64)])
@pytest.mark.parametrize("num_columns", [1, 8192, 8193, 200_000])
def test_every_number_of_rows_has_a_tile_that_fits(num_columns: int, has_large_memory: bool, kilobytes: int) -> None:
    """Each stage holds a part of the weight and of the rows, in 16 bits."""
    for num_rows in range(2, MAX_ROWS + 1):
        tile = tile_for(num_rows, num_columns, has_large_memory)
        assert tile.num_stages * (tile.block_n + max(16, num_rows)) * tile.block_k * 2 <= kilobytes * 1024
    assert tile_for(1, num_columns, has_large_memory).num_stages == 1


@pytest.mark.parametrize("has_large_memory", [True, False])
def test_the_tile_is_the_one_for_the_memory_of_the_device(
    has_large_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(few_rows, "has_large_shared_memory", lambda device: has_large_memory)
    monkeypatch.setattr(few_rows, "tile_for", lambda *args: seen.append(args) or tile_for(*args))
    few_rows_product(random(3, 16), random(24, 16))
    assert seen == [(3, 24, has_large_memory)]


def test_a_linear_layer_computes_with_the_operator() -> None:
    layer = nn.Linear(64, 24, bias=False, device=DEVICE, dtype=DTYPE).requires_grad_(False)
    names = list(layer.state_dict())
    assert few_rows.choose_by_rows(layer)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == names
    for num_rows in (1, 5, MAX_ROWS + 1):
        x = random(1, num_rows, 64)
        out = layer(x)
        assert out.shape == (1, num_rows, 24)
        assert torch.equal(out[0], few_rows_product(x[0], layer.weight))
    assert not few_rows.choose_by_rows(layer)


def test_other_layers_stay_what_they_are() -> None:
    hooked = nn.Linear(4, 4, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    for layer in (nn.Linear(4, 4), hooked, nn.Identity(), None):
        kind = type(layer)
        assert not few_rows.choose_by_rows(layer)
        assert type(layer) is kind


Function = Callable[..., Tensor]


def of_weight(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x.tanh(), weight).sin()


def of_merged(x: Tensor, weight: Tensor) -> Tensor:
    first, second = nn.functional.linear(x, weight).split([8, weight.shape[0] - 8], -1)
    return first.sum() * second


def in_a_sum(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight) + x[0, :, :1]


def added_in_place(x: Tensor, weight: Tensor) -> Tensor:
    return (x[..., :1] + weight[:, 0]) + nn.functional.linear(x, weight)


def of_what_is_computed(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight + 1)


def of_the_weight_as_it_lies(x: Tensor, weight: Tensor) -> Tensor:
    return x[0, :, : weight.shape[0]] @ weight


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """The first layer computes for both, as merging.py has it."""
    gate, up = nn.functional.linear(x, weight).split([10, 10], -1)
    return nn.functional.silu(gate) * up + 1


def with_no_batch(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x[0], weight) + x[0, :, :1].tanh()


@pytest.mark.parametrize(("fn", "products", "sums"), [
    (of_weight, 1, 0), (of_merged, 1, 0), (in_a_sum, 1, 0), (added_in_place, 0, 1), (of_what_is_computed, 0, 0),
    (of_the_weight_as_it_lies, 0, 0), (with_no_batch, 0, 0), (gated, 1, 0),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_what_the_graph_of_a_block_gets(fn: Function, products: int, sums: int, dtype: torch.dtype) -> None:
    weight = random(20, 48, dtype=dtype)
    # Of no named sizes, as the joint weight of merged layers has in a block.
    module: fx.GraphModule = make_fx(lambda *args: fn(*args), select_decomp_table(), tracing_mode="symbolic")(
        random(1, 37, 48, dtype=dtype), weight
    )
    module.graph.eliminate_dead_code()  # as Inductor does ahead of passes
    BlockRewrites()(module.graph)
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    is_half = dtype == DTYPE
    assert targets.count(few_rows_product) == products * is_half
    assert targets.count(auto_functionalized) == sums
    assert targets.count(aten.mm.default) == 1 - sums - products * is_half
    for num_rows in (37, 21):
        x = random(1, num_rows, 48, dtype=dtype)
        torch.testing.assert_close(module(x, weight), fn(x, weight), rtol=0.05, atol=0.1)


def test_the_weight_is_given_to_the_operator_as_it_lies() -> None:
    x, weight = random(1, 5, 32), random(16, 32)
    module = make_fx(of_weight, select_decomp_table(), tracing_mode="symbolic")(x, weight)
    BlockRewrites()(module.graph)
    (node,) = module.graph.find_nodes(op="call_function", target=few_rows_product)
    assert node.args[1].op == "placeholder"
    assert not module.graph.find_nodes(op="call_function", target=aten.permute.default)


def test_a_square_weight_that_is_not_turned_is_left_alone() -> None:
    x, weight = random(5, 16), random(16, 16)
    module = make_fx(lambda x, weight: x @ weight.permute(0, 1), select_decomp_table())(x, weight)
    BlockRewrites()(module.graph)
    module.recompile()
    torch.testing.assert_close(module(x, weight), x @ weight)


def test_a_product_that_experts_add_is_part_of_no_sum() -> None:
    weights = random(8, 6), random(3, 12, 8), random(3, 8, 6)

    def block(x: Tensor, hidden: Tensor, index: Tensor, choice: Tensor, *weights: Tensor) -> Tensor:
        weight, gate_up, down = weights
        return nn.functional.linear(x, weight) + gated_experts(hidden, gate_up, down, index, choice, None)

    def args_of(rows: int) -> tuple[Tensor, ...]:
        index = torch.randint(3, (rows, 2), device=DEVICE)
        return random(rows, 6), random(rows, 8), index, random(rows, 2), *weights

    module = make_fx(block, select_decomp_table(), tracing_mode="symbolic")(*args_of(7))
    BlockRewrites()(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(few_rows_product) == targets.count(added_experts) == 1
    for rows in (7, 5):
        args = args_of(rows)
        torch.testing.assert_close(module(*args), block(*args), rtol=0.05, atol=0.1)


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[object]]:
    """Inductor compiles what is fused, on a CPU too. The operators of all graphs behind the rewrites."""
    torch._dynamo.reset()
    options, block, inner = fusion._inductor_options(), fusion._CompiledBlock, BlockRewrites.__call__
    found: Counter[object] = Counter()

    def spy(self: BlockRewrites, graph: fx.Graph) -> None:
        inner(self, graph)
        for node in graph.find_nodes(op="call_function", target=auto_functionalized):
            found[node.args[0]] += 1
        found.update(node.target for node in graph.nodes if node.op == "call_function")

    monkeypatch.setattr(BlockRewrites, "__call__", spy)
    monkeypatch.setattr(fusion, "_CompiledBlock", lambda module, *_: block(module, "inductor", options))
    # What is cached was rewritten earlier.
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        yield found


@pytest.mark.parametrize(("name", "expected"), [
    ("qwen3", {norm_rope_pair: 1, few_rows_product: 3, add_product: 1}),
    ("qwen3_moe", {norm_rope_pair: 1, few_rows_product: 3, top_k: 1, added_experts: 1}),
])  # fmt: skip
def test_all_rewrites_of_a_block_stand_side_by_side(
    name: str, expected: dict[object, int], rewritten: Counter[object]
) -> None:  # fmt: skip
    logits = []
    for fused in (False, True):
        experts = TRITON if name == "qwen3_moe" else "batched_mm"
        model = HFModel(tiny_model(name, "breakgraph", experts=experts).to(DEVICE, torch.float16), name)
        if fused:
            fuse(model)
        driver = CountingDriver(model, make_attention("sdpa", DEVICE, torch.float16, model.layers))
        logits.append(torch.cat(driver.step([(TokenSequence([1, 5, 9]), 3)], padding=2)))
    assert (logits[0] - logits[1]).abs().max() <= 0.01 * logits[0].abs().max()
    ours = (norm_rope_pair, few_rows_product, add_product, top_k, added_experts, gated_experts)
    left = (aten.mm.default, aten.addmm.default, aten.topk.default)
    assert {target: rewritten[target] for target in (*ours, *left) if rewritten[target]} == expected
