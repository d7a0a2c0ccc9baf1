"""The arithmetic of the memory plan and of the KV budget, on a pretended GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from breakgraph.engine.device_memory import CPU_KV_BYTES, MemoryPlan, free_bytes, kv_budget, measure_sampler
from breakgraph.graph import Peak
from breakgraph.runners import PhaseMemory

GIB, MIB = 1 << 30, 1 << 20
PREFILL = PhaseMemory(
    phase="prefill", num_plans=10, runs_eagerly=False, input_bytes=1 * MIB, eager=Peak(3 * GIB, 4 * GIB),
    pool_bytes=2 * GIB, pool_peak_bytes=GIB, output_bytes=20 * MIB, replay=Peak(90 * MIB, 100 * MIB),
    driver_bytes_per_plan=20 * MIB,
)  # fmt: skip
DECODE = PhaseMemory(
    phase="decode", num_plans=5, runs_eagerly=False, input_bytes=2 * MIB, eager=Peak(GIB, GIB), pool_bytes=GIB,
    pool_peak_bytes=GIB, output_bytes=30 * MIB, replay=Peak(0, 0), driver_bytes_per_plan=4 * MIB,
)  # fmt: skip
PLAN = MemoryPlan((PREFILL, DECODE), sampler=Peak(40 * MIB, 50 * MIB), pool_runs=(2 * GIB,), pool_bytes=2 * GIB)
NOTHING = PhaseMemory(phase="decode", num_plans=0, runs_eagerly=True, input_bytes=0, eager=Peak(7 * GIB, 8 * GIB))


def test_phases_share_pool_and_outputs_and_each_has_inputs_and_plans() -> None:
    assert (PLAN.pool_bytes, PLAN.output_bytes) == (2 * GIB, 30 * MIB)
    assert (PLAN.input_bytes, PLAN.driver_bytes) == (3 * MIB, 220 * MIB)
    assert PLAN.graph_bytes == 2 * GIB + 253 * MIB


def test_a_step_takes_one_thing_at_a_time() -> None:
    assert PLAN.step_bytes == 100 * MIB
    assert replace(PLAN, sampler=Peak(0, 150 * MIB)).step_bytes == 150 * MIB
    eager = replace(PLAN, phases=(PREFILL, replace(DECODE, runs_eagerly=True)))
    assert eager.step_bytes == GIB
    assert replace(PLAN, phases=(PREFILL, NOTHING)).step_bytes == 8 * GIB


def test_a_capture_warms_up_beside_the_pool() -> None:
    assert PLAN.warm_up_bytes == 4 * GIB
    # A phase without captures has no warm-up.
    assert replace(PLAN, phases=(DECODE, NOTHING)).warm_up_bytes == GIB
    assert replace(PLAN, phases=(NOTHING, NOTHING)).warm_up_bytes == 0


def test_what_eager_steps_and_breaks_still_allocate_is_not_avoided() -> None:
    assert PLAN.activation_peak_bytes == 3 * GIB
    assert PLAN.activation_peak_avoided_bytes == 3 * GIB - 90 * MIB
    short = replace(PLAN, phases=(replace(PREFILL, runs_eagerly=True), DECODE))
    assert short.activation_peak_avoided_bytes == 0
    assert replace(PLAN, phases=(PREFILL, replace(DECODE, runs_eagerly=True))).activation_peak_avoided_bytes == 2 * GIB


def test_what_is_not_measured_is_none_and_counts_as_nothing() -> None:
    blind = [replace(phase, eager=Peak(), replay=Peak(), driver_bytes_per_plan=None) for phase in (PREFILL, DECODE)]
    plan = MemoryPlan(tuple(blind), Peak(), (), 2 * GIB)
    assert (plan.driver_bytes, plan.activation_peak_bytes, plan.activation_peak_avoided_bytes) == (None, None, None)
    assert (plan.step_bytes, plan.warm_up_bytes, plan.graph_bytes) == (0, 0, 2 * GIB + 33 * MIB)
    assert json.loads(json.dumps(plan.to_dict()))["phases"]["prefill"]["eager_peak_bytes"] is None


def test_a_cpu_has_a_fixed_budget() -> None:
    cpu = torch.device("cpu")
    assert kv_budget(cpu, 0.9, PLAN, 4) == free_bytes(cpu) == CPU_KV_BYTES
    assert measure_sampler(cpu, 4, 100, torch.float32) == Peak()


@pytest.mark.parametrize(
    ("utilization", "expected"),
    [
        # The share decides: weights, the graphs and a step's own needs go first.
        (0.5, 40 * GIB - 10 * GIB - PLAN.graph_bytes - 100 * MIB),
        # The memory that is there decides: a warm-up takes more than a step of the captured engine.
        (1.0, 70 * GIB - PLAN.graph_bytes - 4 * GIB),
    ],
)
def test_on_cuda_serving_fits_the_share_and_capturing_the_device(
    monkeypatch: pytest.MonkeyPatch, utilization: float, expected: int
) -> None:
    weights, total = 10 * GIB, 80 * GIB
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - weights, total))
    budget = kv_budget(torch.device("cuda", 0), utilization, PLAN, num_tensors=8)
    assert budget == expected - 8 * (2 << 20)
