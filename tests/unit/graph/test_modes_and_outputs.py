"""Grad modes, autocast, random numbers, the collector; and how long outputs are valid."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from breakgraph.errors import CaptureError, StaleOutputError, StalePlanError, UncapturableOpError
from breakgraph.graph import Plan, PlanFamily, eager_on_graph
from breakgraph.graph.plan import EagerStep

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@eager_on_graph
def normalise(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


@pytest.mark.parametrize("replayed", MODES)
@pytest.mark.parametrize("captured", MODES)
def test_capture_and_replay_under_any_pair_of_modes(
    device: torch.device, family: PlanFamily, captured: str, replayed: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    x = torch.randn(3, 4, device=device)
    inside: list[tuple[bool, bool]] = []

    @eager_on_graph
    def spy(t: Tensor) -> Tensor:
        inside.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return t.clone()

    with MODES[captured]():
        plan = family.capture(lambda: normalise(spy(model(x)).exp()))
    with torch.no_grad():
        x.copy_(torch.randn(3, 4, device=device))
    family.poison()
    with MODES[replayed]():
        got = plan.replay().clone()
    with torch.no_grad():
        assert torch.equal(got, normalise(model(x).exp()))
    assert len(set(inside)) == 1


def test_autocast_is_part_of_the_plan(device: torch.device, family: PlanFamily) -> None:
    model, x = nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device)
    inside = []

    @eager_on_graph
    def matmul(t: Tensor) -> Tensor:
        out = t @ t.t()
        inside.append(out.dtype)
        return out

    def fn() -> Tensor:
        return matmul(model(x).float()) + 1

    with torch.no_grad():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            plan = family.capture(fn)
            want = fn()
        got = plan.replay()  # autocast is off here
    assert torch.equal(got, want)
    assert set(inside) == {torch.bfloat16}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


Told = tuple[torch.dtype, torch.device, tuple[bool, ...], list[int]]


def told_by_torch() -> Told:
    kernels = torch.backends.cuda
    may_use = kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    return torch.get_default_dtype(), torch.empty(0).device, may_use, torch._C._get_sdp_priority_order()


CONTEXTS: list[Callable[[], AbstractContextManager[object]]] = [
    lambda: default_dtype(torch.float64),
    lambda: default_device("meta"),
    lambda: torch.device("meta"),
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True),
]


_DTYPE, _DEVICE, _ATTENTION = (0,), (1, 2), (3, 4)
"""Which of them set what: the first and the last for all threads."""


def expected_inside(want: list[Told], caller: Told, around: int) -> list[Told]:
    """What is the process's stays the caller's, but where the captured code set it itself."""
    told = []
    for place, (dtype, device, *attention) in enumerate(want):
        if not (place == 1 and around in _DTYPE):
            dtype = caller[0]
        if not (place == 1 and around in _ATTENTION):
            attention = caller[2:]
        told.append((dtype, device, *attention))
    return told


@pytest.mark.parametrize("around", range(len(CONTEXTS)))
@pytest.mark.parametrize("replayed", [None, *range(len(CONTEXTS))])
def test_contexts_around_a_break_are_entered_at_every_replay(
    device: torch.device, family: PlanFamily, around: int, replayed: int | None
) -> None:
    x, inside = torch.ones(3, device=device), list[Told]()

    @eager_on_graph
    def spy(t: Tensor) -> Tensor:
        inside.append(told_by_torch())
        return t + 1

    def fn() -> Tensor:
        y = spy(x)
        with CONTEXTS[around]():
            y = spy(y)
        return spy(y) * 2

    with torch.no_grad():
        plan = family.capture(fn)
        want, inside[:] = inside[-3:], []
        assert want[0] == want[2]
        assert want[0] != want[1]
        before = told_by_torch()
        with nullcontext() if replayed is None else CONTEXTS[replayed]():
            caller = told_by_torch()
            plan.replay()
            assert told_by_torch() == caller
        assert inside == expected_inside(want, caller, around)
        assert told_by_torch() == before
        assert [step.mode is None for step in plan._steps if isinstance(step, EagerStep)] == [True, False, True]


def test_a_replay_sets_nothing_that_is_the_process_s(monkeypatch: pytest.MonkeyPatch, family: PlanFamily) -> None:
    """Another thread may be building a model in another dtype."""
    x, told = torch.ones(3, device=family.device.torch_device), list[object]()

    @eager_on_graph
    def add(t: Tensor) -> Tensor:
        return t + 1

    with torch.no_grad(), default_dtype(torch.float64), sdpa_kernel(SDPBackend.MATH):
        plan = family.capture(lambda: add(x * 2) * 2)
    monkeypatch.setattr(torch, "set_default_dtype", told.append)
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", told.append)
    plan.replay()
    assert not told


def test_random_numbers_advance_as_eager_ones_do(device: torch.device, family: PlanFamily) -> None:
    x = torch.zeros(64, device=device)

    @eager_on_graph
    def noise(t: Tensor) -> Tensor:
        return t + torch.randn_like(t)

    def fn() -> Tensor:
        y = torch.nn.functional.dropout(x + 1, 0.5)
        return noise(y) + torch.rand_like(y)

    def state() -> Tensor:
        return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()

    with torch.no_grad():
        plan = family.capture(fn)
        torch.manual_seed(1)
        eager = [fn() for _ in range(3)]
        after = state()
        torch.manual_seed(1)
        assert [torch.equal(plan.replay(), want) for want in eager] == [True] * 3
        assert torch.equal(state(), after)


def test_garbage_is_collected_once_a_window(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    collections: list[str] = []
    enabled: list[bool] = []

    def fn() -> Tensor:
        enabled.append(gc.isenabled())
        return x + 1

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collections.append(phase)

    gc.callbacks.append(note)
    try:
        with torch.no_grad(), family.window():
            for _ in range(4):
                family.capture(fn)
    finally:
        gc.callbacks.remove(note)
    assert len(collections) == 1
    assert enabled == [False] * 8
    assert gc.isenabled()


def test_borrowed_outputs_go_stale_and_copies_do_not(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        borrow = family.capture(lambda: x + 1, label="borrow")
        copy = family.capture(lambda: x + 2, label="copy", outputs="copy")
        with pytest.raises(StaleOutputError, match="has not replayed"):
            _ = borrow.outputs
        borrow.replay()
        assert torch.equal(borrow.outputs, x + 1)
        kept = copy.replay()
        with pytest.raises(StaleOutputError, match="borrow"):
            _ = borrow.outputs
        before = x.clone()
        x.zero_()
        borrow.replay()
        copy.replay()
        assert torch.equal(kept, before + 2)
        assert torch.equal(copy.outputs, x + 2)


def test_all_plans_share_one_output_buffer(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(128, 8, device=device)
    with torch.no_grad():
        plans = [family.capture(lambda n=n: {"y": x[:n] + 1, "n": n}) for n in (128, 64, 2)]
        assert family.output_bytes == 128 * 8 * 4
        starts = {plan.replay()["y"].data_ptr() for plan in plans}
        assert len(starts) == 1
        assert [plan.replay()["n"] for plan in plans] == [128, 64, 2]


def test_outputs_may_be_expanded_views_or_inputs(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], list[Tensor]]
) -> None:
    x = torch.randn(3, 4, device=device)

    def fn() -> list[Tensor]:
        return [x, x[:, :1].expand(3, 4) * 1, (x + 1).t(), x[0].expand(2, 4)]

    with torch.no_grad():
        plan = family.capture(fn)
        x.copy_(torch.randn(3, 4, device=device))
        for got, want in zip(replay(plan), fn(), strict=True):
            assert torch.equal(got, want)


def test_a_function_that_changes_its_mind_is_refused(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    calls = iter(range(9))
    with torch.no_grad(), pytest.raises(CaptureError, match="in the warm-up"):
        family.capture(lambda: x[: 4 - next(calls)] + 1)


@pytest.mark.parametrize("kind", ["SimpleNamespace", "set", "generator"])
def test_outputs_that_no_replay_can_make_are_refused(device: torch.device, family: PlanFamily, kind: str) -> None:
    x = torch.randn(4, device=device)
    make: dict[str, Callable[[Tensor], object]] = {
        "SimpleNamespace": lambda y: SimpleNamespace(y=y), "set": lambda y: {y}, "generator": lambda y: iter([y])
    }  # fmt: skip
    named = {"generator": "list_iterator"}.get(kind, kind)
    with torch.no_grad(), pytest.raises(CaptureError, match=f"type {named}, and each call makes another"):
        family.capture(lambda: make[kind](x + 1))


def test_a_gradient_does_not_get_lost_in_a_break(device: torch.device, family: PlanFamily) -> None:
    layer, x = nn.Linear(4, 4).to(device), torch.randn(3, 4, device=device)

    def gradient() -> Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad((normalise(layer(y)) + y * y).sum(), y)[0]

    with pytest.raises(UncapturableOpError, match=r"pass through the break normalise.* detach what"):
        family.capture(gradient)
    layer(x).sum().backward()  # nothing is left on the weights
    plan = family.capture(lambda: normalise(layer(x)))
    assert torch.equal(plan.replay(), normalise(layer(x)))
    plan = family.capture(gradient, breaks=False)
    x.normal_()
    assert torch.equal(plan.replay(), gradient())


def test_an_external_tensor_whose_owner_is_gone_is_kept(device: torch.device, family: PlanFamily) -> None:
    """A one-slot cache drops the first shape's table; the plan still reads it."""
    cache: dict[int, Tensor] = {}
    buffer = torch.randn(8, device=device)

    def fn(n: int) -> Tensor:
        if n not in cache:
            cache.clear()
            cache[n] = torch.arange(n, device=device) * 1.5
        return buffer[:n] + cache[n]

    with torch.no_grad():
        plans = {n: family.capture(lambda n=n: fn(n)) for n in (8, 4)}
        junk = [torch.full((8,), float("nan"), device=device) for _ in range(32)]
        assert torch.equal(plans[8].replay(), buffer + torch.arange(8, device=device) * 1.5)
    assert junk[0].isnan().all()


def test_a_replaced_storage_is_refused(device: torch.device, family: PlanFamily) -> None:
    """In-place updates reach the plan; the graph holds addresses, not Python objects."""
    layer, x = nn.Linear(4, 4, bias=False).to(device), torch.randn(2, 4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: layer(x))
        layer.weight.mul_(2)
        assert torch.equal(plan.replay(), layer(x))
        layer.weight.data = torch.zeros_like(layer.weight)
        with pytest.raises(StalePlanError, match=r"Linear\.weight"):
            plan.replay()
