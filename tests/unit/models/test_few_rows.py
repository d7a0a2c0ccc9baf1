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
from breakgraph.models.few_rows import MAX_ROWS, Tile, add_product, few_rows_product, gated_product, multiply, takes
from breakgraph.models.norm_rope import norm_rope_pair
from breakgraph.models.rewrites import BlockRewrites
from breakgraph.models.top_k import top_k
from packed_driver import CountingDriver, TokenSequence
from tiny_models import tiny_model

aten = torch.ops.aten
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter cannot multiply bfloat16."""
TILES = {
    "vector": Tile(4, 64, 4, 1, is_vector=True),
    "small": Tile(16, 32, 2, 3),
    "wide": Tile(32, 128, 4, 4),
    "split": Tile(16, 32, 4, 4, splits=2),
    "more splits than blocks": Tile(64, 32, 4, 3, splits=7),
}
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


def assert_gated(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """silu(gate) * up without a rounding in between."""
    x, halves = x.double(), weight.double().chunk(2)
    gate, up = (x @ half.t() for half in halves)
    expected = gate * gate.sigmoid() * up
    most_gate, most_up = (x.abs() @ half.abs().t() for half in halves)
    slack = 2e-6 * (1.1 * most_gate * up.abs() + gate.abs() * most_up)
    slack += torch.finfo(out.dtype).eps * expected.abs() / 1.9 + torch.finfo(out.dtype).smallest_normal
    assert out.isfinite().all()
    assert ((out.double() - expected).abs() <= slack).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles_of_any_size_give_the_product(tile: Tile, shape: tuple[int, int]) -> None:
    num_columns, width = shape
    for num_rows in (1, 2, 3, 4) if tile.is_vector else (1, 2, 15, 16, 17, 33):
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
            weight = random(2 * num_columns, width, dtype=dtype) / width**0.5
            multiply(out, x, weight, gated=True, tile=tile)
            assert_gated(out, x, weight)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 15, 16, 17, 32, 64])
@pytest.mark.parametrize(("num_columns", "width"), [(384, 256), (256, 768), (130, 72)])
def test_the_operators_give_the_product_of_any_number_of_rows(
    num_rows: int, num_columns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit of today, and all rows with the tiles that are there for more."""
    x, weight = random(num_rows, width), random(num_columns, width)
    before = random(1, num_rows, num_columns)
    for limit in {MAX_ROWS, 64}:
        monkeypatch.setattr(few_rows, "MAX_ROWS", limit)
        out = few_rows_product(x, weight)
        assert out.is_contiguous()
        if not takes(x, weight):
            assert torch.equal(out, torch.mm(x, weight.t()))
        else:
            assert_product(out, x, weight)
            total = before.clone()
            add_product(total, x, weight.t())
            assert_product(total[0], x, weight, before[0])
        halves = weight / width**0.5
        gated = gated_product(x, halves)
        assert gated.is_contiguous()
        if takes(x, halves):
            assert_gated(gated, x, halves)
        else:
            gate, up = torch.mm(x, halves.t()).float().chunk(2, -1)
            torch.testing.assert_close(gated, (nn.functional.silu(gate) * up).to(x.dtype), rtol=1e-3, atol=1e-6)


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


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_a_row_has_its_bits_whatever_the_others_are(tile: Tile) -> None:
    x, weight = random(4, 200), random(40, 200)
    out, other = (torch.empty(4, 40, device=DEVICE, dtype=x.dtype) for _ in range(2))
    multiply(out, x, weight, tile=tile)
    for row in (0, 3):
        strange = torch.full_like(x, float("nan"))
        strange[row] = x[row]
        multiply(other, strange, weight, tile=tile)
        assert torch.equal(other[row], out[row])
    multiply(other, x, weight, tile=tile)
    assert torch.equal(other, out)


@pytest.mark.parametrize("columns", [100, 10_000])
@pytest.mark.parametrize("large", [True, False])
def test_every_number_of_rows_has_a_tile(columns: int, large: bool) -> None:
    for num_rows in range(1, 129):
        tile = few_rows.tile_for(num_rows, columns, large)
        assert not tile.is_vector or (num_rows <= 4 and tile.splits == 1)


def test_captured_products_count_with_zeros_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(3, 64), random(48, 64)
    monkeypatch.setattr(few_rows, "_zeros", {})
    monkeypatch.setattr(few_rows, "_NUM_ZEROS", 10)
    few_rows.reserve_zeros(x.device)
    (zeros,) = few_rows._zeros.values()

    def product() -> None:
        out = torch.empty(3, 48, device=DEVICE, dtype=x.dtype)
        multiply(out, x, weight, tile=TILES["split"])
        assert_product(out, x, weight)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    product()
    assert len(few_rows._zeros[x.device]) == 10  # eager ones clear their own
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for left in (7, 4, 1, 1):
        product()
        rest = few_rows._zeros[x.device]
        assert len(rest) == left
        assert rest.untyped_storage().data_ptr() == zeros.data_ptr()  # those that were taken are kept
    few_rows.reserve_zeros(x.device)
    assert len(few_rows._zeros[x.device]) == 1
    assert not zeros.any()


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


def gated_by_the_other_half(x: Tensor, weight: Tensor) -> Tensor:
    up, gate = nn.functional.linear(x, weight).split([10, 10], -1)
    return nn.functional.silu(gate) * up


def gated_in_unequal_parts(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = nn.functional.linear(x, weight).split([1, weight.shape[0] - 1], -1)
    return nn.functional.silu(gate) * up


def gated_over_tokens(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = nn.functional.linear(x[:, :20], weight).split([10, 10], 1)
    return nn.functional.silu(gate) * up


def gated_and_read(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = nn.functional.linear(x, weight).split([10, 10], -1)
    return nn.functional.silu(gate) * up + gate


def gated_by_itself(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = nn.functional.linear(x, weight).split([10, 10], -1)
    return nn.functional.silu(gate) * gate + up


def gated_otherwise(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = nn.functional.linear(x, weight).split([10, 10], -1)
    return nn.functional.gelu(gate) * up


def with_no_batch(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x[0], weight) + x[0, :, :1].tanh()


@pytest.mark.parametrize(("fn", "products", "sums", "gates"), [
    (of_weight, 1, 0, 0), (of_merged, 1, 0, 0), (in_a_sum, 1, 0, 0), (added_in_place, 0, 1, 0),
    (of_what_is_computed, 0, 0, 0), (of_the_weight_as_it_lies, 0, 0, 0), (with_no_batch, 0, 0, 0), (gated, 0, 0, 1),
    (gated_by_the_other_half, 1, 0, 0), (gated_in_unequal_parts, 1, 0, 0), (gated_over_tokens, 1, 0, 0),
    (gated_and_read, 1, 0, 0), (gated_by_itself, 1, 0, 0), (gated_otherwise, 1, 0, 0),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_what_the_graph_of_a_block_gets(fn: Function, products: int, sums: int, gates: int, dtype: torch.dtype) -> None:
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
    assert targets.count(gated_product) == gates * is_half
    assert targets.count(auto_functionalized) == sums
    assert targets.count(aten.mm.default) == 1 - sums - (products + gates) * is_half
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
    ("qwen3", {norm_rope_pair: 1, few_rows_product: 2, gated_product: 1, add_product: 1}),
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
    ours = (norm_rope_pair, few_rows_product, gated_product, add_product, top_k, added_experts, gated_experts)
    left = (aten.mm.default, aten.addmm.default, aten.topk.default)
    assert {target: rewritten[target] for target in (*ours, *left) if rewritten[target]} == expected
