"""Replays are bit-equal to eager whatever else uses the pool between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from breakgraph.errors import BreakResultError, PoolLeakError, StalePoolTensorError
from breakgraph.graph import Plan, PlanFamily, break_graph, eager_on_graph

Replay = Callable[[Plan], Tensor]


@eager_on_graph
def halve(x: Tensor) -> Tensor:
    return x / 2


@eager_on_graph
def add_rows(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([a + b for a, b in zip(x, y, strict=True)])


@eager_on_graph(mutates=("out",))
def reverse_into(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x.flip(0))
    return out


class Tower(nn.Module):
    """Layers with a break each: inputs used by two breaks, results of breaks used by breaks, views of one storage."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        first = x + 1
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, dim=-1)
            mixed = add_rows(q, k)
            again = add_rows(mixed, v)  # an argument that came from an earlier break
            out = torch.empty_like(again)
            reverse_into(again.transpose(0, 1).contiguous().transpose(0, 1), out)
            x = halve(out) + first.sigmoid()  # `first` is read long after its segment
            x = x + halve(q)  # an argument of two breaks
        return x


def capture_buckets(family: PlanFamily, model: nn.Module, buffer: Tensor, buckets: list[int]) -> dict[int, Plan]:
    with family.window():
        return {n: family.capture(lambda n=n: model(buffer[:n]), label=f"b{n}") for n in buckets}


def test_buckets_of_one_pool_under_poison(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    model = Tower(16, 3).to(device)
    buffer = torch.zeros(64, 16, device=device)
    with torch.inference_mode():
        plans = capture_buckets(family, model, buffer, [64, 32, 8, 1])
        for n in [8, 64, 1, 32, 64, 8, 1]:
            buffer[:n].copy_(torch.randn(n, 16, device=device))
            assert torch.equal(replay(plans[n]), model(buffer[:n])), n
    assert plans[64].num_breaks == 5 * 3
    assert plans[64].num_segments == plans[64].num_breaks + 1


def test_smaller_buckets_fit_in_the_largest_ones_pool(device: torch.device, family: PlanFamily) -> None:
    model = Tower(256, 2).to(device)
    buffer = torch.zeros(2048, 256, device=device)
    with torch.inference_mode():
        capture_buckets(family, model, buffer, [2048])
        largest = family.pool_bytes
        capture_buckets(family, model, buffer, [1024, 512, 128])
    assert largest <= family.pool_bytes <= 1.3 * largest


def test_a_break_result_survives_what_others_allocate(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(1000, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: halve(x) * 3)
        others = [torch.full((1000,), float("nan"), device=device) for _ in range(64)]
        x.copy_(torch.randn(1000, device=device))
        assert torch.equal(plan.replay(), x / 2 * 3)
    assert all(bool(other.isnan().all()) for other in others)


def test_the_break_sees_real_data_at_capture(device: torch.device, family: PlanFamily) -> None:
    x = torch.arange(6.0, device=device)
    seen: list[list[float]] = []

    @eager_on_graph
    def look(t: Tensor) -> Tensor:
        seen.append(t.tolist())
        return t.clone()

    with torch.no_grad():
        family.capture(lambda: look(look(x * 2) + 1))
    warm_up, captured = seen[:2], seen[2:]
    assert captured == warm_up == [[0.0, 2, 4, 6, 8, 10], [1.0, 3, 5, 7, 9, 11]]


def test_results_keep_their_strides(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.randn(6, 8, device=device)

    @eager_on_graph
    def pieces(t: Tensor) -> tuple[Tensor, ...]:
        left, right = (t + 1).chunk(2, dim=-1)
        return left, right, (t * 2).t(), (t * 3)[1:4, ::2]

    strides: list[tuple[int, ...]] = []

    def fn() -> list[Tensor]:
        got = pieces(x)
        strides[:] = [t.stride() for t in got]
        return [t * 1 for t in got]

    with torch.no_grad():
        eager = [t.stride() for t in pieces(x)]
        plan = family.capture(fn)
        assert strides == eager
        x.copy_(torch.randn(6, 8, device=device))
        for got, want in zip(replay(plan), fn(), strict=True):
            assert torch.equal(got, want)


def test_a_repeated_result_is_one_boundary(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.randn(4, device=device)

    @eager_on_graph
    def twice(t: Tensor) -> dict[str, Tensor]:
        y = t.exp()
        return {"a": y, "b": y}

    def fn() -> Tensor:
        got = twice(x)
        got["a"].add_(1)  # visible through "b" as well
        return got["b"] * 2

    with torch.no_grad():
        plan = family.capture(fn)
        assert torch.equal(replay(plan), fn())
    assert plan.explain().steps[1].boundary_bytes == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: t, "overlaps an argument"),
        (lambda t: t[1:], "overlaps an argument"),
        (lambda t: t[:1].clone().expand(4), "overlaps itself"),
        (lambda t: (lambda y: (y[:3], y[1:]))(t.clone()), "overlap"),
        (lambda t: object(), "return tensors"),
    ],
)
def test_refused_results(
    device: torch.device, family: PlanFamily, make: Callable[[Tensor], object], message: str
) -> None:
    x = torch.randn(4, device=device)
    marked = eager_on_graph(make)

    def fn() -> Tensor:
        marked(x + 0)
        return x * 1

    with torch.no_grad(), pytest.raises(BreakResultError, match=message):
        family.capture(fn)
    with torch.no_grad():
        assert torch.equal(family.capture(lambda: x * 2).replay(), x * 2)


def test_written_arguments_are_not_copied(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.randn(5, 3, device=device)

    def fn() -> Tensor:
        out = torch.empty_like(x)
        returned = reverse_into(x * 2, out)
        return out + returned

    with torch.no_grad():
        plan = family.capture(fn)
        x.copy_(torch.randn(5, 3, device=device))
        assert torch.equal(replay(plan), fn())
    assert plan.explain().steps[1].boundary_bytes == 0


def test_a_tensor_made_in_a_break_must_be_its_result(device: torch.device, family: PlanFamily) -> None:
    stash: dict[str, Tensor] = {}

    @eager_on_graph
    def hide(t: Tensor) -> None:
        stash["t"] = t * 2

    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        hide(x + 1)
        return stash["t"] + 1

    with torch.no_grad(), pytest.raises(BreakResultError, match="made inside break"):
        family.capture(fn)


def test_first_use_state_is_a_leak_that_names_its_holder(device: torch.device, family: PlanFamily) -> None:
    class Lazy(nn.Module):
        table: Tensor | None = None
        ready = False

        def forward(self, x: Tensor) -> Tensor:
            if self.ready and self.table is None:
                self.table = torch.zeros_like(x) + 1
            return x + (self.table if self.table is not None else 0)

    model, x = Lazy(), torch.randn(4, device=device)
    calls = iter(range(10))

    def fn() -> Tensor:
        model.ready = next(calls) > 0  # not in the warm-up: the first use is inside the segment
        return model(x)

    with torch.no_grad(), pytest.raises(PoolLeakError, match=r"Lazy\.table"):
        family.capture(fn)
    model.table = None
    model.ready = True
    with torch.no_grad():
        plan = family.capture(lambda: model(x))  # the warm-up makes it outside the pool now
        assert torch.equal(plan.replay(), x + 1)


def test_a_pool_tensor_of_another_plan_is_refused(device: torch.device, family: PlanFamily) -> None:
    kept: list[Tensor] = []
    x = torch.randn(4, device=device)
    calls = iter(range(10))

    def leaks() -> Tensor:
        if next(calls) > 0:
            kept.append(x * 2)
        return x + 1

    with torch.no_grad():
        with pytest.raises(PoolLeakError):
            family.capture(leaks)
        for fn in (lambda: kept[0] + 1, lambda: halve(kept[0]) + 1):
            with pytest.raises(StalePoolTensorError, match="older than the plan"):
                family.capture(fn)


def test_empty_breaks_and_empty_segments(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        break_graph()
        y = x * 2
        break_graph()
        break_graph()
        return y + 1

    with torch.no_grad():
        plan = family.capture(fn)
        assert torch.equal(replay(plan), fn())
    nodes = [step.num_nodes for step in plan.explain().steps if step.kind == "segment"]
    assert [n > 0 for n in nodes] == [False, True, False, True]


def test_nested_breaks_belong_to_the_outermost(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    @eager_on_graph
    def outer(t: Tensor) -> Tensor:
        return halve(t) + halve(t * 3)

    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: outer(x) + 1)
        assert torch.equal(replay(plan), outer(x) + 1)
    assert plan.num_breaks == 1


def test_without_breaks_marked_calls_are_recorded(device: torch.device, family: PlanFamily, replay: Replay) -> None:
    x = torch.randn(4, 4, device=device)
    runs = []

    @eager_on_graph
    def double(t: Tensor) -> Tensor:
        runs.append(1)
        return t * 2

    with torch.no_grad():
        plan = family.capture(lambda: double(x) + 1, breaks=False)
        count = len(runs)
        x.copy_(torch.randn(4, 4, device=device))
        assert torch.equal(replay(plan), x * 2 + 1)
    assert (plan.num_segments, plan.num_breaks, len(runs)) == (1, 0, count)


def test_plans_of_other_sizes_split_one_reserved_run(device: torch.device) -> None:
    """Without it, a plan of few large tensors and one of many small ones each bring blocks of their own."""
    x = torch.randn(10 << 20, device=device)

    def few_large() -> Tensor:
        return (x + 1).sin() * 2

    def many_small() -> Tensor:
        parts = [part * 2 for part in x.split(1 << 19)]
        return torch.stack([part.sum() for part in parts])

    def alone(fn: Callable[[], Tensor]) -> int:
        with PlanFamily(device) as family:
            family.capture(fn)
            return family.pool_bytes

    with torch.no_grad():
        largest = max(alone(few_large), alone(many_small))
        with PlanFamily(device) as family:
            family.reserve(largest)
            assert family.pool_bytes >= largest
            for fn in (many_small, few_large):
                assert torch.equal(family.capture(fn).replay(), fn())
            assert family.pool_bytes <= 1.05 * largest
        with PlanFamily(device) as family:
            family.capture(many_small)
            family.capture(few_large)
            assert family.pool_bytes > 1.3 * largest
