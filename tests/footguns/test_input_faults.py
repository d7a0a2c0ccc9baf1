"""Faults of what a plan is given: other memory, other types, other threads, plans that are gone."""

from __future__ import annotations

import gc
import re
import threading

import pytest
import torch
from torch import Tensor, nn

import breakgraph
from breakgraph.errors import StalePlanError
from breakgraph.graph import PlanFamily, eager_on_graph


@eager_on_graph
def halved(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize(
    ("change", "now"),
    [(lambda x: x.double(), "float64"), (lambda x: x.clone(), "float32"), (lambda x: x[:2].clone(), "[2, 4]")],
    ids=["type", "memory", "shape"],
)
def test_f41_another_input_than_the_captured_one_is_refused_at_replay(device: torch.device, change, now: str) -> None:
    model, x = nn.Linear(4, 4).to(device), torch.randn(3, 4, device=device)
    step = {"hidden": [x]}
    with torch.no_grad(), breakgraph.capture(lambda step: model(step["hidden"][0]), step) as graph:
        graph.replay()
        kept = x.data
        x.data = change(x.data)
        with pytest.raises(StalePlanError, match=r"static input .*hidden.*was float32.*and is .*" + re.escape(now)):
            graph.replay()
        x.data = kept
        x.copy_(torch.randn(3, 4))
        assert torch.equal(graph.replay(), model(x))


def test_f41_the_casts_around_a_body_are_captured_with_it(device: torch.device) -> None:
    body = nn.Linear(4, 4).to(device, torch.bfloat16)
    x = torch.randn(3, 4, device=device)
    with torch.no_grad(), breakgraph.capture(lambda x: halved(body(x.to(torch.bfloat16))).float(), x) as graph:
        x.copy_(torch.randn(3, 4))
        replayed = graph.replay()
        assert replayed.dtype == torch.float32
        assert torch.equal(replayed, (body(x.to(torch.bfloat16)) / 2).float())


def test_f44_one_plan_goes_and_its_siblings_stay_right(device: torch.device, family: PlanFamily) -> None:
    x, weight = torch.randn(64, 32, device=device), torch.randn(32, 64, device=device)
    with torch.no_grad():
        plans = {n: family.capture(lambda n=n: halved(x[:n] @ weight) @ weight.t()) for n in (64, 16, 4)}
        plans[64].invalidate()
        gc.collect()
        others = [torch.full((64, 64), float("nan"), device=device) for _ in range(32)]
        for n in (16, 4, 16):
            x.copy_(torch.randn(64, 32))
            family.poison()
            assert torch.equal(plans[n].replay(), (x[:n] @ weight / 2) @ weight.t())
        with pytest.raises(StalePlanError):
            plans[64].replay()
        assert all(other.isnan().all() for other in others)


def test_f19_another_thread_computes_during_captures(device: torch.device, family: PlanFamily) -> None:
    x, stop, errors, sums = torch.randn(16, device=device), threading.Event(), [], []

    def compute() -> None:
        try:
            while not stop.is_set() or not sums:
                sums.append(torch.ones(8).to(device).add_(1).sum().item())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        with torch.no_grad():
            plans = [family.capture(lambda: halved(halved(x + 1) * 3) + 1) for _ in range(10)]
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert set(sums) == {16.0}
    x.copy_(torch.randn(16))
    for plan in plans:
        assert sum(step.num_ops or 0 for step in plan.explain().steps) == 4  # the last one fills the output
        assert torch.equal(plan.replay(), (x + 1) / 2 * 3 / 2 + 1)


def test_f36_no_two_plans_share_a_graph(device: torch.device, family: PlanFamily) -> None:
    model, x = nn.Linear(4, 4).to(device), torch.randn(3, 4, device=device)
    with torch.no_grad():
        plans = [family.capture(lambda: halved(model(x)) + 1) for _ in range(2)]
        segments = [step.segment for plan in plans for step in plan._steps if hasattr(step, "segment")]
        assert len(segments) == len({id(segment) for segment in segments}) == 4
        plans[0].close()
        assert torch.equal(plans[1].replay(), model(x) / 2 + 1)


def test_f42_the_report_says_what_each_step_costs(device: torch.device, family: PlanFamily) -> None:
    model, x = nn.Linear(4, 4).to(device), torch.randn(3, 4, device=device)

    def steps(x: Tensor) -> Tensor:
        return model(halved(halved(x) * 2))  # nothing is captured before the first break

    with torch.no_grad():
        plan = family.capture(lambda: steps(x))
        assert all(step.host_sec is None for step in plan.explain().steps)
        plan.replay()
        assert all(step.host_sec is None for step in plan.explain().steps)  # the first one is no measure
        for _ in range(5):
            plan.replay()
    report = plan.explain()
    assert [step.kind for step in report.steps] == ["segment", "break", "segment", "break", "segment"]
    assert report.steps[0].num_nodes == 0
    assert report.steps[0].host_sec is None
    for step in report.steps[1:]:
        assert step.host_sec is not None
        assert step.host_sec > 0
        assert step.num_nodes if step.kind == "segment" else step.boundary_bytes
    assert report.pool_peak_bytes > 0
    assert report.output_bytes == 48
    assert report.to_dict()["steps"][1]["host_sec"] == report.steps[1].host_sec
    assert ("us" in str(report)) == (device.type == "cuda")
