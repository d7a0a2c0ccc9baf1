"""The Triton experts, in Triton's interpreter where there is no GPU, against the same sums spelt out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from breakgraph.models import expert_groups, expert_ops
from breakgraph.models.expert_groups import group as group_pairs
from breakgraph.models.expert_ops import Tile, Tiles, added_experts, gated_experts
from triton_device import DEVICE

NUM_EXPERTS, TOP_K, WIDTH, INNER = 5, 2, 24, 20


class Case:
    def __init__(self, num_tokens: int, *, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.x, self.choice = random(num_tokens, WIDTH), random(num_tokens, top_k).abs()
        self.gate_up, self.down = random(num_experts, 2 * INNER, WIDTH), random(num_experts, WIDTH, INNER)
        self.index = torch.stack(
            [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)]
        ).to(DEVICE) if num_tokens else torch.empty(0, top_k, dtype=torch.int64, device=DEVICE)  # fmt: skip

    def run(self, num_live: int | None = None) -> Tensor:
        live = None if num_live is None else torch.tensor([num_live], dtype=torch.int32, device=DEVICE)
        return gated_experts(self.x, self.gate_up, self.down, self.index, self.choice, live)

    def expected(self, num_live: int | None = None) -> Tensor:
        out = torch.zeros(len(self.x), WIDTH, dtype=torch.float64, device=DEVICE)
        for token in range(len(self.x) if num_live is None else num_live):
            for expert, weight in zip(self.index[token].tolist(), self.choice[token].tolist(), strict=True):
                if 0 <= expert < len(self.down):
                    gate, up = (self.gate_up[expert].double() @ self.x[token].double()).chunk(2)
                    out[token] += weight * (self.down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        return out

    def check(self, num_live: int | None = None) -> None:
        out = self.run(num_live)
        assert (out.double() - self.expected(num_live)).abs().max().item() < 1e-3
        if num_live is not None:
            assert not out[num_live:].any()


@pytest.mark.parametrize("num_tokens", [1, 7, 70])
def test_sums_over_the_chosen_experts(num_tokens: int) -> None:
    Case(num_tokens).check()


@pytest.mark.parametrize("num_live", [0, 1, 8, 19])
def test_padding_reaches_no_expert_and_is_zero(num_live: int) -> None:
    case = Case(19)
    case.x[num_live:] = torch.nan
    case.choice[num_live:] = torch.nan
    case.check(num_live)


def test_everybody_wants_the_same_expert_and_some_nobody_wants() -> None:
    case = Case(40)
    case.index[:] = torch.tensor([3, 1], device=DEVICE)
    case.check()


def test_sentinels_of_the_router_count_nothing() -> None:
    case = Case(12)
    case.index[::3, 0], case.index[5] = NUM_EXPERTS, -1
    case.index[7] = torch.tensor([1 << 32, -(1 << 63)])  # whose lower halves are experts
    case.check()
    assert not case.run()[5].any()
    assert not case.run()[7].any()


def test_no_tokens() -> None:
    assert Case(0).run().shape == (0, WIDTH)


@pytest.mark.parametrize("few", [1 << 20, 0], ids=["one kernel", "three"])
@pytest.mark.parametrize("num_live", [None, 0, 43])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "block_m"), [(1, 9, 16), (70, 9, 16), (200, 9, 32), (90, 40, 64), (1500, 5, 128)]
)
def test_groups_hold_each_pair_once_and_in_order(
    num_tokens: int, num_experts: int, block_m: int, num_live: int | None, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_groups, "_FEW", few)
    case = Case(num_tokens, num_experts=num_experts, top_k=3)
    case.index[::5, 1], case.index[::7, 0] = -1, num_experts
    live = None if num_live is None else torch.tensor([num_live], dtype=torch.int32, device=DEVICE)
    groups = group_pairs(case.index, live, num_experts, block_m)
    flat, seen, experts = case.index.flatten().tolist(), [], []
    for tile, (expert, count) in enumerate(
        zip(groups.tile_experts.tolist(), groups.tile_rows.tolist(), strict=True)
    ):
        pairs = groups.rows[tile * block_m : tile * block_m + count].tolist()
        assert [flat[pair] for pair in pairs] == [expert] * count
        assert pairs == sorted(pairs)
        seen += pairs
        experts += [expert] * bool(count)
    live_pairs = range(3 * (num_tokens if num_live is None else min(num_live, num_tokens)))
    assert sorted(seen) == [pair for pair in live_pairs if 0 <= flat[pair] < num_experts]
    full = [-(-[flat[pair] for pair in seen].count(expert) // block_m) for expert in range(num_experts)]
    assert experts == [expert for expert, tiles in enumerate(full) for _ in range(tiles)]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("block_k", "group"), [(16, 1 << 20), (16, 1), (16, 2), (32, 3)])
def test_widths_beyond_one_block(swap: bool, block_k: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(16, block_k, 4, 2, swap, group)
    monkeypatch.setattr(expert_ops, "tiles_for", lambda *key: Tiles(16, tile, tile))
    Case(23).check()


@pytest.mark.parametrize("swap", [False, True])
def test_a_row_has_its_bits_whatever_else_is_in_the_step(swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(16, 16, 4, 2, swap)
    monkeypatch.setattr(expert_ops, "tiles_for", lambda *key: Tiles(16, tile, tile))
    case = Case(40)
    out = case.run(25)
    case.x[:7], case.index[:7] = case.x[7:14].clone(), case.index[7:14].clone()
    assert torch.equal(case.run(31)[7:25], out[7:25])


@pytest.mark.parametrize("num_live", [None, 0, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_added_has_the_bits_of_a_sum_afterwards(num_live: int | None, dtype: torch.dtype) -> None:
    case = Case(19)
    x, gate_up, down, choice = (t.to(DEVICE, dtype) for t in (case.x, case.gate_up, case.down, case.choice))
    live = None if num_live is None else torch.tensor([num_live], dtype=torch.int32, device=DEVICE)
    args = x, gate_up, down, case.index, choice, live
    residual = torch.randn(1, 19, WIDTH).to(DEVICE, dtype)
    before, experts = residual.clone(), gated_experts(*args)
    added = added_experts(residual, *args)
    assert added.shape == residual.shape
    assert torch.equal(added, residual + experts)
    assert torch.equal(residual, before)
    if num_live is not None:
        assert torch.equal(added[:, num_live:], residual[:, num_live:])
    scattered = residual.transpose(1, 2).contiguous().transpose(1, 2)
    assert not scattered.is_contiguous()
    assert torch.equal(added_experts(scattered, *args), added)


def test_nothing_is_added_to_nothing() -> None:
    case = Case(0)
    residual = torch.empty(1, 0, WIDTH, device=DEVICE)
    args = case.x, case.gate_up, case.down, case.index, case.choice, None
    assert added_experts(residual, *args).shape == residual.shape


def test_weights_with_any_strides() -> None:
    case = Case(9)
    case.gate_up = case.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    case.down = case.down.transpose(1, 2).contiguous().transpose(1, 2)
    case.check()


def test_inputs_may_lie_anywhere() -> None:
    case = Case(19)
    expected = case.run()
    case.x, case.index, case.choice = (t.T.contiguous().T for t in (case.x, case.index, case.choice))
    assert not case.x.is_contiguous()
    assert torch.equal(case.run(), expected)
    # As those say that trace it.
    meta = [t.to("meta") for t in (case.x, case.gate_up, case.down, case.index, case.choice)]
    assert case.run().stride() == gated_experts(*meta, None).stride()


@pytest.mark.parametrize("num_tokens", [1, 100, 1000])
@pytest.mark.parametrize(("is_large", "limit"), [(True, 224), (False, 96)])
def test_tiles_fit_into_the_memory_of_the_gpu(num_tokens: int, is_large: bool, limit: int) -> None:
    """Rows of the input and of both halves of the weight, 2 bytes each, once a stage."""
    tiles = expert_ops.tiles_for(num_tokens * 8, 16, torch.bfloat16, is_large)
    for tile, columns in ((tiles.up, 2 * tiles.up.block_n), (tiles.down, tiles.down.block_n)):
        assert (tiles.block_m + columns) * tile.block_k * 2 * tile.num_stages <= limit * 1024
