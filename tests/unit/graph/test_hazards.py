"""The scan before a capture: every planted hazard is named with its module and line, and a break takes it in."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import breakgraph
from breakgraph.errors import (
    BreakArgumentError,
    BreakResultError,
    CaptureError,
    ConfigError,
    HazardError,
    HazardWarning,
)
from breakgraph.graph import PlanFamily, eager_on_graph


def item_branch(x: Tensor) -> Tensor:
    return x + 1 if x.sum().item() > 0 else x - 1


def upload(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0], device=x.device)


def rows_above_zero(x: Tensor) -> Tensor:
    return x.mean(-1).nonzero().float().mean().expand(x.shape) + x


def masked(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def to_the_host(x: Tensor) -> Tensor:
    return x + x.sum().to("cpu")


def printed(x: Tensor) -> Tensor:
    return x + len(f"{x}")


OWN = torch.Generator().manual_seed(3)


def own_generator(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5), generator=OWN)


def host_random(x: Tensor) -> Tensor:
    return x * random.random()


def numpy_random(x: Tensor) -> Tensor:
    return x * np.random.rand()


PLANTED: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (item_branch, "host sync", "_local_scalar_dense"),
    (upload, "pageable copy", r"torch\.tensor\(data, device"),
    (rows_above_zero, "data-dependent shape", "nonzero"),
    (masked, "data-dependent shape", "boolean mask"),
    (to_the_host, "host sync", r"Tensor\.to\(\)"),
    (printed, "host sync", "__format__"),
    (own_generator, "unregistered generator", "with a generator"),
    (host_random, "unregistered generator", "a random generator"),
    (numpy_random, "unregistered generator", "a random generator"),
]
HOST_RANDOM = (host_random, numpy_random)
EACH = pytest.mark.parametrize(("planted", "kind", "what"), PLANTED, ids=[fn.__name__ for fn, _, _ in PLANTED])


class Inner(nn.Module):
    def __init__(self, planted: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.planted = planted

    def forward(self, x: Tensor) -> Tensor:
        return self.planted(x * 2)


class Model(nn.Module):
    def __init__(self, planted: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Inner(planted)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)) + 1


@EACH
def test_f25_a_hazard_is_named_with_module_line_and_way_out(
    planted: Callable[[Tensor], Tensor], kind: str, what: str
) -> None:
    with torch.no_grad(), pytest.raises(HazardError, match=what) as caught:
        breakgraph.capture(Model(planted), torch.randn(3, 4))
    (hazard,) = caught.value.report.blocking
    assert hazard.kind == kind
    assert hazard.way_out in str(caught.value)
    if planted not in HOST_RANDOM:  # drawn where no operator shows
        assert hazard.module == "Model.inner"
        assert f"{__file__}:{planted.__code__.co_firstlineno + 1} in {planted.__name__}" == hazard.source


@pytest.mark.parametrize("planted", [fn for fn, _, _ in PLANTED if fn not in HOST_RANDOM], ids=lambda fn: fn.__name__)
def test_f25_on_hazard_break_makes_it_work(planted: Callable[[Tensor], Tensor]) -> None:
    model, x = Model(planted), torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(model, x, on_hazard="break") as graph:
        assert "forward" not in model.inner.__dict__, "the marks are taken off"
        (made,) = [step for step in graph.explain().steps if step.kind == "break"]
        assert made.name == "Model.inner"
        assert f"in {planted.__name__}" in made.reason
        assert made.reason in str(graph.explain())
        for sign in (1, -1):
            x.copy_(torch.randn(3, 4) * sign)
            OWN.manual_seed(5)
            replayed = graph.replay().clone()
            OWN.manual_seed(5)
            assert torch.equal(replayed, model(x))


def test_all_hazards_come_at_once() -> None:
    model = nn.Sequential(Model(item_branch), nn.GELU(), Model(masked))
    with torch.no_grad(), pytest.raises(HazardError, match=r"(?s)^2 hazards:.*0\.inner.*2\.inner") as caught:
        breakgraph.capture(model, torch.randn(3, 4))
    assert [h.module for h in caught.value.report.hazards] == ["Sequential.0.inner", "Sequential.2.inner"]


def test_nothing_is_found_in_a_break(device: torch.device) -> None:
    model, x = Model(item_branch).to(device), torch.randn(3, 4, device=device)
    breakgraph.mark_eager(model, "inner")
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        assert graph.explain().notes == ()
        x.neg_()
        assert torch.equal(graph.replay(), model(x))


def test_full_records_marked_calls_so_their_hazards_count() -> None:
    model = Model(item_branch)
    breakgraph.mark_eager(model, "inner")
    with torch.no_grad(), pytest.raises(HazardError, match="_local_scalar_dense"):
        breakgraph.capture(model, torch.randn(3, 4), backend="full")


def test_warn_goes_on_and_the_capture_refuses() -> None:
    with (
        torch.no_grad(),
        pytest.warns(HazardWarning, match="boolean mask"),
        pytest.raises(CaptureError, match="boolean mask"),
    ):
        breakgraph.capture(Model(masked), torch.randn(3, 4), on_hazard="warn")


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="on_hazard"):
        breakgraph.capture(lambda x: x + 1, torch.ones(1), on_hazard="ignore")  # type: ignore[arg-type]


def test_a_function_outside_of_modules_becomes_the_break() -> None:
    x = torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(lambda x: item_branch(x * 2) + 1, x, on_hazard="break") as graph:
        assert [s.name for s in graph.explain().steps if s.kind == "break"] == ["item_branch"]
        for value in (1.0, -1.0):
            x.fill_(value)
            assert torch.equal(graph.replay(), item_branch(x * 2) + 1)
    assert not isinstance(item_branch, breakgraph.graph.EagerBreak)


def test_a_local_function_is_named_as_one_to_decorate() -> None:
    def local(x: Tensor) -> Tensor:
        return x[x > 0].sum() + x

    with torch.no_grad(), pytest.raises(HazardError, match=r"local\(\) is no global function; decorate"):
        breakgraph.capture(local, torch.randn(3), on_hazard="break")


class Refuses(nn.Module):
    def forward(self, x: Tensor, *, mask: Tensor | None) -> Tensor:
        raise ValueError("not for this shape")


class TriesAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast = Refuses()

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            self.fast(x, mask=None)
        return x * x.sum().item()


def test_a_module_that_raises_is_left_again(device: torch.device) -> None:
    with torch.no_grad(), pytest.raises(HazardError) as raised:
        breakgraph.capture(TriesAnother(), torch.ones(3, device=device))
    assert [hazard.module for hazard in raised.value.report.blocking] == ["TriesAnother"]


class Number(nn.Module):
    """Returns a number that code outside steers by."""

    def forward(self, x: Tensor) -> int:
        return int(x.sum().item() > 0)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = Number()

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.number(x) else x - 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chooses = Chooses()

    def forward(self, x: Tensor) -> Tensor:
        return self.chooses(x + 1) * 3


def test_the_break_grows_until_no_number_leaves_it() -> None:
    model, x = Outer(), torch.randn(4)
    with torch.no_grad(), breakgraph.capture(model, x, on_hazard="break") as graph:
        assert [s.name for s in graph.explain().steps if s.kind == "break"] == ["Outer.chooses"]
        for value in (3.0, -3.0):
            x.fill_(value)
            assert torch.equal(graph.replay(), model(x))


def test_a_number_that_a_break_read_may_not_steer_captured_code() -> None:
    model = Chooses()
    breakgraph.mark_eager(model, "number")
    with torch.no_grad(), pytest.raises(BreakResultError, match=r"reads a tensor on the host .*test_hazards\.py"):
        breakgraph.capture(model, torch.randn(4))


def test_a_constant_may_leave_a_break_and_is_compared() -> None:
    count = torch.tensor(2)

    @breakgraph.eager_on_graph
    def read() -> int:
        return breakgraph.constant(int(count.item()))

    x = torch.randn(4)
    with torch.no_grad(), breakgraph.capture(lambda x: (x + 1) * read(), x) as graph:
        assert torch.equal(graph.replay(), (x + 1) * 2)
        count.fill_(3)
        with pytest.raises(breakgraph.errors.ResultMismatchError, match="was 2"):
            graph.replay()


def test_a_declared_constant_steers_captured_code(device: torch.device) -> None:
    depth, x = torch.tensor([3, 1], device=device), torch.randn(4, device=device)

    def forward(x: Tensor) -> Tensor:
        for _ in range(breakgraph.constant(depth)[0]):
            x = x * 2
        return x - breakgraph.constant(7)

    with torch.no_grad(), breakgraph.capture(forward, x) as graph:
        assert graph.explain().num_breaks == 0
        x.add_(1)
        assert torch.equal(graph.replay(), forward(x))
        assert torch.equal(graph.replay(), x * 8 - 7)


def test_what_changes_between_warm_up_runs_is_no_constant() -> None:
    calls = torch.zeros((), dtype=torch.int64)

    def forward(x: Tensor) -> Tensor:
        calls.add_(1)
        return x * breakgraph.constant(calls)

    with torch.no_grad(), pytest.raises(CaptureError, match="no constant"):
        PlanFamily("cpu").capture(lambda: forward(torch.ones(2)), warmup=2)


def test_an_object_is_no_constant() -> None:
    with pytest.raises(ConfigError, match="constant to declare"):
        breakgraph.constant(object())  # type: ignore[type-var]


class Stateful(nn.Module):
    def __init__(self, change: Callable[[Stateful], None]) -> None:
        super().__init__()
        self.change = change
        self.calls = 0
        self.log: list[int] = []
        self.buf: Tensor | None = None
        self.key: object = None

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return x + 1


def counts(module: Stateful) -> None:
    module.calls += 1


def logs(module: Stateful) -> None:
    module.log.append(1)


def replaces(module: Stateful) -> None:
    module.buf = torch.zeros(2)


@pytest.mark.parametrize(("change", "name"), [(counts, "calls"), (logs, "log"), (replaces, "buf")])
def test_python_side_effects_are_named(change: Callable[[Stateful], None], name: str) -> None:
    model = nn.Sequential(Stateful(change))
    with torch.no_grad(), pytest.raises(HazardError, match=rf"Sequential\.0\.{name} cannot be captured: it is changed"):
        breakgraph.capture(model, torch.ones(2))


def test_on_hazard_break_repeats_side_effects() -> None:
    model = nn.Sequential(Stateful(counts))
    with torch.no_grad(), breakgraph.capture(model, torch.ones(2), on_hazard="break") as graph:
        before = model[0].calls
        graph.replay()
        graph.replay()
        assert model[0].calls == before + 2


def test_side_effects_in_a_break_are_none() -> None:
    model = nn.Sequential(Stateful(counts), Stateful(logs))
    breakgraph.mark_eager(model, "*")
    with torch.no_grad(), breakgraph.capture(model, torch.ones(2)) as graph:
        assert graph.explain().num_breaks == 2


def test_f22_first_use_state_is_a_note() -> None:
    def first_use(module: Stateful) -> None:
        if module.buf is None:
            module.buf = torch.zeros(2)

    model = nn.Sequential(Stateful(first_use))
    with torch.no_grad(), breakgraph.capture(model, torch.ones(2)) as graph:
        (note,) = graph.explain().notes
        assert "Sequential.0.buf" in note
        assert "first call" in note


def test_f21_a_one_slot_cache_is_first_use_state() -> None:
    def one_slot(module: Stateful) -> None:
        if module.key != "key":
            module.key, module.buf = "key", torch.zeros(2)

    model = nn.Sequential(Stateful(one_slot))
    with torch.no_grad(), breakgraph.capture(model, torch.ones(2)) as graph:
        assert len(graph.explain().notes) == 2
        assert torch.equal(graph.replay(), torch.full((2,), 2.0))


def test_dropout_draws_from_a_registered_generator() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        torch.manual_seed(1)
        replayed = graph.replay().clone()
        torch.manual_seed(1)
        assert torch.equal(replayed, model(x))


def test_a_hazard_in_a_hook_goes_to_the_module_around() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.GELU()), torch.randn(3, 4)
    model[0][0].register_forward_pre_hook(lambda module, args: (args[0] * (1 if args[0].sum().item() > 0 else 2),))
    with torch.no_grad(), breakgraph.capture(model, x, on_hazard="break") as graph:
        assert [s.name for s in graph.explain().steps if s.kind == "break"] == ["Sequential.0"]
        x.neg_()
        assert torch.equal(graph.replay(), model(x))


def test_a_hazard_that_no_break_can_take_in_is_an_error() -> None:
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0] * args[0].sum().item(),))
    made = "no break was made: Linear: it is a break, and this is outside"
    with torch.no_grad(), pytest.raises(HazardError, match=made):
        breakgraph.capture(model, torch.randn(3, 4), on_hazard="break")
    assert "forward" not in model.__dict__
    breakgraph.mark_eager(nn.Sequential(model), "0")
    with torch.no_grad(), pytest.raises(HazardError, match=made):
        breakgraph.capture(model, torch.randn(3, 4), on_hazard="break")


def test_the_scan_leaves_state_and_hooks_as_they_were() -> None:
    total, x = torch.zeros(2), torch.ones(2)
    hooks = nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    with torch.no_grad(), breakgraph.capture(lambda x: total.add_(x) + 0, x, state=[total]) as graph:
        assert total.sum() == 0
        graph.replay()
        assert total.sum() == 2
    assert len(hooks) == before


class OutOfReach:
    """A proxy as web frameworks have them, asked where nothing is behind it."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("outside of a request")


request = OutOfReach()


def test_what_a_function_names_is_not_asked_what_it_is(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vars(self)["request"] = request  # torch itself asks what an attribute is

        def forward(self, x: Tensor) -> Tensor:
            return x + (0 if self.request is None else 1)

    model, x = Model(), torch.randn(3, device=device)

    def fn(x: Tensor) -> Tensor:
        return x if request is None else model(x)

    with torch.no_grad(), breakgraph.capture(fn, x) as captured:
        assert torch.equal(captured.replay(), x + 1)


class Pipeline:
    """No module, but it holds one."""

    def __init__(self, model: nn.Module) -> None:
        self.stages = {"only": [model]}
        self.num_calls = 0

    def counting(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * self.num_calls

    def plain(self, x: Tensor) -> Tensor:
        return self.stages["only"][0](x)

    __call__ = plain


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.inner(x) * self.num_calls


@pytest.mark.parametrize(("fn", "what"), [
    (lambda pipeline: pipeline.plain, r"Counting\.num_calls"), (lambda pipeline: pipeline, r"Counting\.num_calls"),
    (lambda pipeline: lambda x: pipeline.plain(x), r"Counting\.num_calls"),
    (lambda pipeline: pipeline.counting, r"Pipeline\.num_calls"),
    (lambda pipeline: lambda x: pipeline.counting(x), r"Pipeline\.num_calls"),
])  # fmt: skip
def test_side_effects_are_seen_however_a_model_is_held(
    fn: Callable[[Pipeline], Callable[[Tensor], Tensor]], what: str, device: torch.device
) -> None:
    pipeline = Pipeline(Counting().to(device))
    with torch.no_grad(), pytest.raises(HazardError, match=f"1 hazard|^{what}") as failure:
        breakgraph.capture(fn(pipeline), torch.randn(2, 4, device=device))
    (hazard,) = failure.value.report.hazards
    assert hazard.kind == "Python side effect"
    assert hazard.what == what.replace("\\", "")


def test_a_model_that_a_pipeline_holds_is_captured(device: torch.device) -> None:
    pipeline, x = Pipeline(nn.Linear(4, 4).to(device)), torch.randn(2, 4, device=device)
    with torch.no_grad(), breakgraph.capture(pipeline, x, verify=True) as captured:
        assert torch.equal(captured.replay(), pipeline(x))


@eager_on_graph
def tripled(x: Tensor) -> Tensor:
    return x * 3


def test_transforms_of_functions_are_captured_whole(device: torch.device) -> None:
    layer, x = nn.Linear(3, 3).to(device), torch.randn(2, 3, device=device)

    def gradients(x: Tensor) -> dict[str, Tensor]:
        return grad(lambda weights: functional_call(layer, weights, (x,)).sum())(dict(layer.named_parameters()))

    for fn in (vmap(layer), gradients):
        with breakgraph.capture(fn, x) as graph:
            x.data.normal_()
            torch.testing.assert_close(graph.replay(), fn(x))
    with pytest.raises(BreakArgumentError, match=r"inside of a transform of torch\.func"):
        breakgraph.capture(vmap(tripled), x)
