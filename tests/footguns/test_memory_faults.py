"""Faults of memory: who owns what a break reads, what a segment reads, and what a caller holds."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import PoolLeakError, StaleOutputError
from breakgraph.graph import Plan, PlanFamily, eager_on_graph

Replay = Callable[[Plan], Tensor]


@eager_on_graph
def scaled(x: Tensor) -> Tensor:
    return x * 3


@eager_on_graph
def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) + y.flip(0)


def fill(x: Tensor, seed: int) -> None:
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


@torch.no_grad()
def test_f01_what_a_break_reads_is_rewritten_before_it_is_read(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x = torch.zeros(64, 8, device=device)
    weight = torch.randn(8, 8, device=device)

    def layer(x: Tensor) -> Tensor:
        partly = torch.empty_like(x)
        partly[: len(x) // 2] = x[: len(x) // 2] @ weight  # the segment writes one half, the break reads that half
        early = scaled(partly[: len(x) // 2])
        late = joined(early, early * 2)  # an argument that came from a break, used by two of them
        return joined(late, early) + scaled(x[len(x) // 2 :])

    plans = {n: family.capture(lambda n=n: layer(x[:n])) for n in (64, 32, 8)}
    for seed, n in enumerate((64, 8, 32, 8, 64)):
        fill(x, seed)
        assert torch.equal(replay(plans[n]), layer(x[:n])), n


@torch.no_grad()
def test_f02_a_breaks_result_survives_what_others_allocate(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x = torch.zeros(256, 256, device=device)
    plan = family.capture(lambda: scaled(x + 1) @ x)
    gc.collect()
    others = [torch.full_like(x, float("nan")) for _ in range(64)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    fill(x, 1)
    assert torch.equal(replay(plan), scaled(x + 1) @ x)
    assert all(other.isnan().all() for other in others)


@torch.no_grad()
def test_f03_outputs_held_past_the_next_replay_are_refused_and_copies_are_not(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    with PlanFamily(device) as family:
        lent = family.capture(lambda: x + 1)
        copied = family.capture(lambda: x + 2, outputs="copy")
        lent.replay()
        assert lent.outputs.tolist() == [1.0] * 4
        kept = copied.replay()
        with pytest.raises(StaleOutputError, match="another plan has overwritten them"):
            _ = lent.outputs
        x.fill_(5)
        lent.replay()
        assert kept.tolist() == copied.outputs.tolist() == [2.0] * 4


class OneSlotCache(nn.Module):
    """Keeps a table for the last length that it saw, and drops the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table = 0, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.length != len(x):
            self.length, self.table = len(x), torch.arange(len(x), device=x.device).float()[:, None]
        return scaled(x + self.table) - self.table


@torch.no_grad()
def test_f21_a_table_that_its_owner_has_dropped_is_kept(
    device: torch.device, family: PlanFamily, replay: Replay
) -> None:
    x, model = torch.zeros(16, 3, device=device), OneSlotCache()
    plans = {n: family.capture(lambda n=n: model(x[:n])) for n in (16, 4)}
    junk = [torch.full((n, 1), float("nan"), device=device) for n in (16, 4) for _ in range(50)]
    fill(x, 1)
    assert torch.equal(replay(plans[16]), OneSlotCache()(x))
    assert torch.equal(replay(plans[4]), OneSlotCache()(x[:4]))
    assert len(junk) == 100


class FirstUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.buffer: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1 and self.buffer is None:  # not in the warm-up: in the capture
            self.buffer = x * 0 + 1
        return x if self.buffer is None else x + self.buffer


@torch.no_grad()
def test_f22_f45_state_that_is_first_made_in_a_capture_names_its_holder(
    device: torch.device, family: PlanFamily
) -> None:
    x, model = torch.zeros(8, device=device), FirstUse()
    with pytest.raises(PoolLeakError, match=r"FirstUse\.buffer"):
        family.capture(lambda: model(x))
    # Made before, it is an ordinary tensor that the plan keeps.
    ready = FirstUse()
    ready(x), ready(x)
    plan = family.capture(lambda: ready(x))
    ready.buffer = None
    gc.collect()
    family.poison()
    assert plan.replay().tolist() == [1.0] * 8


@torch.no_grad()
def test_f37_buckets_share_their_memory(device: torch.device) -> None:
    x = torch.zeros(4096, 256, device=device)

    def bytes_of(buckets: list[int]) -> int:
        with PlanFamily(device) as family:
            for n in buckets:
                family.capture(lambda n=n: scaled(torch.tanh(x[:n]) * 2) + 1)
            return family.pool_bytes

    assert bytes_of([4096, 2048, 1024, 512]) <= 1.3 * bytes_of([4096])


@torch.no_grad()
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.chunk(2, dim=1)[1],
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: torch.stack([t, t + 1]).transpose(0, 2)[1],
    ],
    ids=["chunk", "transpose", "slice", "deep"],
)
def test_f47_a_result_that_is_a_view_keeps_its_strides(
    device: torch.device, family: PlanFamily, replay: Replay, view: Callable[[Tensor], Tensor]
) -> None:
    x = torch.zeros(6, 4, device=device)
    strides: list[tuple[int, ...]] = []

    @eager_on_graph
    def viewed(x: Tensor) -> Tensor:
        return view(torch.tanh(x))

    def fn() -> Tensor:
        made = viewed(x + 1)
        strides.append(made.stride())
        return made.reshape(-1) * 2

    plan = family.capture(fn)
    fill(x, 3)
    assert torch.equal(replay(plan), view(torch.tanh(x + 1)).reshape(-1) * 2)
    assert len(set(strides)) == 1


@torch.no_grad()
def test_f47_an_expanded_result_is_refused(device: torch.device, family: PlanFamily) -> None:
    x = torch.zeros(1, 4, device=device)

    @eager_on_graph
    def expanded(x: Tensor) -> Tensor:
        return (x * 2).expand(3, 4)

    with pytest.raises(breakgraph.errors.BreakResultError):
        family.capture(lambda: expanded(x + 1) + 1)
