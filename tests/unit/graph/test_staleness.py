"""Plans that no longer fit what they were captured with raise before anything runs; live names and kept outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.backends import make_backend
from breakgraph.errors import (
    BreakArgumentError,
    ClosedError,
    ConfigError,
    ReplayError,
    StaleOutputError,
    StalePlanError,
)
from breakgraph.graph import Live, PlanFamily, ShapeKey


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) / self.running_var


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.norm = Norm()
        self.drop = nn.Dropout(0.5)
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.proj(x))) * self.table


def replace_weight(model: Model) -> None:
    model.proj.weight = nn.Parameter(torch.zeros(4, 4))


def replace_data(model: Model) -> None:
    model.proj.weight.data = torch.zeros(4, 4)


def replace_buffer(model: Model) -> None:
    model.norm.running_mean = torch.ones(4)


def replace_attribute(model: Model) -> None:
    model.table = torch.zeros(4)


def drop_buffer(model: Model) -> None:
    del model.norm.running_var


def wrap_layer(model: Model) -> None:
    """As adapters are put around layers: the weight stays."""
    model.proj = nn.Sequential(model.proj, nn.Tanh()).eval()


CHANGES: list[tuple[Callable[[Model], object], str]] = [
    (replace_weight, r"Model\.proj\.weight was float32.* in other memory"),
    (replace_data, r"Model\.proj\.weight was float32.* in other memory"),
    (replace_buffer, r"Model\.norm\.running_mean was .* in other memory"),
    (replace_attribute, r"Model\.table was .* in other memory"),
    (drop_buffer, r"Model\.norm\.running_var was .* and is NoneType"),
    (lambda model: model.train(), "module Model was in evaluation mode and is in training mode"),
    (lambda model: model.drop.train(), r"module Model\.drop was in evaluation mode"),
    (lambda model: model.double(), r"was float32.* and is float64"),
    (wrap_layer, r"module Model\.proj was Linear and is Sequential"),
    (lambda model: setattr(model, "drop", nn.Dropout(0.1).eval()), r"module Model\.drop was Dropout and is another"),
    (lambda model: model.add_module("head", nn.Tanh()), r"module Model\.head was nothing and is Tanh"),
    (lambda model: delattr(model, "drop"), r"module Model\.drop was Dropout and is nothing"),
]
NAMES = [
    "weight", "data", "buffer", "attribute", "removed", "train", "train-inner", "dtype", "wrapped", "replaced", "added",
    "deleted",
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=NAMES)
def test_f32_f33_what_changed_after_the_capture_is_named(change: Callable[[Model], object], message: str) -> None:
    model, x = Model().eval(), torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        graph.replay()
        change(model)
        for _ in range(2):
            with pytest.raises(StalePlanError, match=f"{message}.*invalidate"):
                graph.replay()


def test_f32_an_update_in_place_is_seen_by_the_replay(device: torch.device) -> None:
    model, x = Model().eval().to(device), torch.randn(3, 4, device=device)
    model.table = model.table.to(device)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model.proj.weight.copy_(torch.randn(4, 4))
        assert torch.equal(graph.replay(), model(x))


def test_f33_recapture_works_on_the_new_weights(device: torch.device) -> None:
    model, x = nn.Linear(4, 4).to(device), torch.randn(3, 4, device=device)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model.weight = nn.Parameter(torch.randn(4, 4, device=device))
        graph.invalidate()
        with pytest.raises(StalePlanError, match="was invalidated; capture it again"):
            graph.replay()
        graph.recapture()
        assert torch.equal(graph.replay(), model(x))


def test_f33_an_invalidated_family_is_captured_again_through_its_backend() -> None:
    model, x, key = nn.Linear(4, 4), torch.randn(3, 4), ShapeKey("decode", 3)
    with torch.no_grad(), PlanFamily("cpu") as family:
        backend = make_backend("breakable", family)
        backend.capture(key, lambda: model(x))
        family.invalidate()
        assert not backend.captured(key)
        assert backend.explain() == {}
        with pytest.raises(StalePlanError, match="invalidated"):
            backend.replay(key)
        backend.capture(key, lambda: model(x))
        assert torch.equal(backend.replay(key), model(x))


@pytest.mark.parametrize("late", [False, True])
def test_a_late_check_comes_behind_all_launches(device: torch.device, late: bool) -> None:
    model, x = nn.Linear(4, 4).eval().to(device), torch.randn(3, 4, device=device)
    counts, calls = torch.zeros(2, device=device), list[str]()

    def note() -> None:
        calls.append("break")

    @breakgraph.eager_on_graph
    def noted() -> None:
        note()

    def forward() -> torch.Tensor:
        counts[0] += 1
        y = model(x)
        noted()
        counts[1] += 1
        return model(y)

    with torch.no_grad(), PlanFamily(device) as family:
        family.checks_late = late
        plan = family.capture(forward, state=[counts])
        weight, calls[:] = model.weight, []
        model.weight = nn.Parameter(torch.zeros_like(weight))
        with pytest.raises(StalePlanError, match=r"Linear\.weight was"):
            plan.replay()
        assert counts.tolist() == [float(late)] * 2
        assert len(calls) == late
        with pytest.raises(StaleOutputError, match="its last replay failed"):
            _ = plan.outputs
        model.weight, counts[:] = weight, 0
        for _ in range(8):  # through those whose launches are timed
            assert torch.equal(plan.replay(), model(model(x)))
        assert counts.tolist() == [8, 8]


def test_what_a_stale_plan_ran_into_is_told_as_stale(device: torch.device) -> None:
    model, x, fails = nn.Linear(4, 4).eval().to(device), torch.randn(3, 4, device=device), list[str]()

    @breakgraph.eager_on_graph
    def meets_garbage() -> None:
        if fails:
            raise ValueError(fails[0])

    def forward() -> torch.Tensor:
        meets_garbage()
        return model(x)

    with torch.no_grad(), PlanFamily(device) as family:
        family.checks_late = True
        plan = family.capture(forward)
        fails.append("garbage")
        with pytest.raises(ValueError, match="garbage"):
            plan.replay()
        model.weight = nn.Parameter(torch.zeros_like(model.weight))
        with pytest.raises(StalePlanError, match=r"Linear\.weight was") as caught:
            plan.replay()
        assert isinstance(caught.value.__context__, ValueError)


def test_an_interrupt_of_a_stale_plan_is_one(device: torch.device) -> None:
    model, x, interrupts = nn.Linear(4, 4).eval().to(device), torch.randn(3, 4, device=device), list[bool]()

    @breakgraph.eager_on_graph
    def waits() -> None:
        if interrupts:
            raise KeyboardInterrupt

    def forward() -> torch.Tensor:
        waits()
        return model(x)

    with torch.no_grad(), PlanFamily(device) as family:
        family.checks_late = True
        plan = family.capture(forward)
        plan.replay()
        model.weight = nn.Parameter(torch.zeros_like(model.weight))
        interrupts.append(True)
        with pytest.raises(KeyboardInterrupt):
            plan.replay()
        with pytest.raises(StaleOutputError, match="its last replay failed"):
            _ = plan.outputs


def test_a_late_check_asks_first_whether_the_plan_is_there() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(3, 4)
    with torch.no_grad(), PlanFamily("cpu") as family:
        family.checks_late = True
        plan = family.capture(lambda: model(x))
        plan.close()
        with pytest.raises(ClosedError):
            plan.replay()


def test_the_order_of_modules_counts() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model._modules["0"] = model._modules.pop("0")
        with pytest.raises(StalePlanError, match="the modules in Sequential have another order"):
            graph.replay()


def test_weights_that_only_breaks_read_may_be_replaced() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    breakgraph.mark_eager(model, "1")
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model[1].weight = nn.Parameter(torch.randn(4, 4))
        model[1].train(False)
        assert torch.equal(graph.replay(), model(x))


def test_other_modules_of_the_process_do_not_matter() -> None:
    whole = nn.ModuleDict({"used": nn.Sequential(nn.Linear(4, 4), nn.GELU()), "unused": nn.Linear(4, 4)})
    x = torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(whole["used"], x) as graph:
        whole["unused"].eval()
        whole["unused"].weight = nn.Parameter(torch.zeros(4, 4))
        assert torch.equal(graph.replay(), whole["used"](x))


def test_modules_that_are_made_meanwhile_do_not_matter() -> None:
    """By another thread, say; here by a tensor that is looked at."""
    other = nn.Module()

    class Growing(Tensor):
        def data_ptr(self) -> int:
            setattr(other, f"attribute_{len(vars(other))}", 1)
            return super().data_ptr()

    other.table = torch.ones(2).as_subclass(Growing)
    x, before = torch.randn(2, 4), len(vars(other))
    with torch.no_grad(), breakgraph.capture(Model().eval(), x) as captured:
        captured.replay()
    assert len(vars(other)) > before


def test_f32_a_dropout_beside_the_only_weight_counts() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(), torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model[1].train()
        with pytest.raises(StalePlanError, match=r"module Sequential\.1 was in evaluation mode"):
            graph.replay()


def test_f32_a_weight_whose_hook_asks_for_the_mode_counts() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(3, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,) if module.training else None)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model.train()
        with pytest.raises(StalePlanError, match=r"module Linear was in evaluation mode"):
            graph.replay()


def test_f32_another_parameter_on_the_same_memory_is_no_change() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model.weight = nn.Parameter(model.weight.data)
        assert torch.equal(graph.replay(), model(x))
        model.weight.data = torch.zeros(4, 4)
        with pytest.raises(StalePlanError, match=r"Linear\.weight was .* in other memory"):
            graph.replay()


class LastLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) != len(x):
            self.table = torch.arange(len(x)).float()
        return x + self.table


def test_f21_a_table_that_the_model_replaces_itself_is_no_change() -> None:
    model, x = LastLength(), torch.zeros(3)
    with torch.no_grad(), breakgraph.capture(model, x) as graph:
        model(torch.zeros(5))
        assert graph.replay().tolist() == [0.0, 1.0, 2.0]


def test_a_version_token_is_compared() -> None:
    x, adapter = torch.randn(3), {"version": 1}
    with torch.no_grad(), breakgraph.capture(lambda x: x + 1, x, version=lambda: adapter["version"]) as graph:
        graph.replay()
        adapter["version"] = 2
        with pytest.raises(StalePlanError, match=r"version= gave 1 at the capture and gives 2 now"):
            graph.replay()
        graph.recapture()
        assert torch.equal(graph.replay(), x + 1)


def test_f03_a_kept_output_is_poisoned(device: torch.device) -> None:
    x = torch.randn(3, device=device)
    with torch.no_grad(), breakgraph.capture(lambda x: {"out": x + 1}, x, outputs="poison") as graph:
        kept = graph.replay()["out"]
        assert torch.equal(kept, x + 1)
        fresh = graph.replay()["out"]
        assert kept.isnan().all()
        assert torch.equal(fresh, x + 1)
        assert graph.outputs["out"] is fresh


def test_poisoned_outputs_are_lent_to_the_next_replay_of_the_family() -> None:
    x = torch.randn(3)
    with torch.no_grad(), PlanFamily("cpu") as family:
        one = family.capture(lambda: x + 1, outputs="poison")
        other = family.capture(lambda: x + 2)
        kept = one.replay()
        other.replay()
        assert kept.isnan().all()
        with pytest.raises(ReplayError, match="another plan"):
            _ = one.outputs


@dataclass
class Batch:
    scale: float
    cache: object = None


@breakgraph.eager_on_graph
def scaled(h: Tensor, batch: Batch) -> Tensor:
    return h * batch.scale


def test_f05_a_live_name_sees_the_current_step(device: torch.device) -> None:
    x, step = torch.randn(3, device=device), Live[Batch]("step")
    step.set(Batch(2.0, object()))
    with torch.no_grad(), breakgraph.capture(lambda x: scaled(x + 1, batch=step) - 1, x) as graph:
        for scale in (3.0, 4.0):
            step.set(Batch(scale))
            assert torch.equal(graph.replay(), (x + 1) * scale - 1)
        assert torch.equal(scaled(x, step), x * 4.0)


def test_f05_the_object_itself_is_refused() -> None:
    with torch.no_grad(), pytest.raises(BreakArgumentError, match=r"argument batch\.cache of break scaled"):
        breakgraph.capture(lambda x: scaled(x, Batch(1.0, object())), torch.ones(2))


def test_a_live_name_is_no_part_of_a_container() -> None:
    @breakgraph.eager_on_graph
    def first(h: Tensor, values: list[Live[float]]) -> Tensor:
        return h * values[0].value

    step = Live[float]("step")
    step.set(2.0)
    with torch.no_grad(), pytest.raises(BreakArgumentError, match=r"values\[0\] of break .* is Live"):
        breakgraph.capture(lambda x: first(x, [step]), torch.ones(2))


def test_a_live_name_without_a_value() -> None:
    with torch.no_grad(), pytest.raises(ConfigError, match="'step' was never set"):
        breakgraph.capture(lambda x: scaled(x, Live("step")), torch.ones(2))
