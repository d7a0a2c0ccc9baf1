"""The memory report against what the parts hold, and the measuring of a runner on a device that pretends to measure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph import LLM
from breakgraph.engine.config import EngineConfig
from breakgraph.engine.loading import load_engine
from breakgraph.errors import ClosedError
from breakgraph.graph import Peak
from breakgraph.graph.cpu_device import CpuDevice
from tiny_models import tiny_model
from unit.engine.small import SMALL

ENGINE = {name: value for name, value in SMALL.items() if name != "use_tqdm"}


def test_the_report_adds_up(llm: LLM) -> None:
    report = llm.memory_report()
    plans = llm.explain()
    assert [(bucket.phase, bucket.bucket) for bucket in report.buckets] == [
        ("prefill", 16), ("prefill", 4), ("decode", 8), ("decode", 2),
    ]  # fmt: skip
    for bucket, plan in zip(report.buckets, plans.values(), strict=True):
        assert bucket.activation_bytes == plan.pool_peak_bytes > 0
        assert bucket.boundary_bytes == sum(step.boundary_bytes for step in plan.steps)
        assert bucket.output_bytes == plan.output_bytes > 0
        assert bucket.activation_bytes <= report.pool_bytes
    by_bucket = {(bucket.phase, bucket.bucket): bucket.activation_bytes for bucket in report.buckets}
    assert by_bucket["prefill", 16] > by_bucket["prefill", 4]
    assert by_bucket["decode", 8] > by_bucket["decode", 2]
    stats = llm.stats()
    assert (report.pool_bytes, report.kv_cache_bytes) == (stats["pool_bytes"], stats["kv_cache_bytes"])
    assert report.output_bytes == stats["output_bytes"] >= max(bucket.output_bytes for bucket in report.buckets)
    assert report.graph_bytes == report.pool_bytes + report.output_bytes + report.input_bytes + (
        report.driver_bytes or 0
    )
    # Fields start 256 bytes apart, as none here is larger. Prefill: three of the tokens, one of the requests, how many
    # tokens live; for breaks offsets, lengths and block tables, which take 256 bytes at most. Decode: four, the lengths
    # and the block tables, then how many tokens live, of 4 bytes, in 8.
    assert report.input_bytes == (5 + 3) * 256 + 6 * 256 + 8
    weights = sum(p.nbytes for p in tiny_model("llama", "eager").parameters())
    assert weights <= report.weight_bytes < weights + 4096  # and rope tables
    as_json = json.loads(json.dumps(report.to_dict()))
    assert as_json["buckets"][0]["activation_bytes"] == by_bucket["prefill", 16]
    assert as_json["estimate"] == json.loads(json.dumps(stats["estimated_memory"]))


def test_the_emulated_device_measures_sizes_and_says_what_it_does_not_measure(llama_folder: Path) -> None:
    with LLM(str(llama_folder), device="cpu", **SMALL) as llm:
        report = llm.memory_report()
    assert report.emulated
    assert report.driver_bytes is None
    assert {bucket.driver_bytes for bucket in report.buckets} == {None}
    assert report.estimate.activation_peak_bytes is report.estimate.driver_bytes is None
    assert report.estimate.pool_bytes > 0


def test_nothing_captured_is_a_report_too(llama_folder: Path, device: torch.device) -> None:
    eager = {"prefill_backend": "eager", "decode_backend": "eager"}
    with LLM(str(llama_folder), device=str(device), **SMALL, **eager) as llm:
        report = llm.memory_report()
    assert report.buckets == ()
    assert (report.pool_bytes, report.output_bytes, report.estimate.pool_bytes) == (0, 0, 0)
    with pytest.raises(ClosedError):
        llm.memory_report()


class MeasuringDevice:
    """Makes the CPU device measure: each thing it is asked about gets the next number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver_per_capture: list[int]) -> None:
        self.peaks = 0
        self.driver = 0
        self._driver_calls = 0
        self._steps = driver_per_capture
        monkeypatch.setattr(CpuDevice, "emulated", False)
        monkeypatch.setattr(CpuDevice, "peak_of", lambda device, run: self._peak(run))
        monkeypatch.setattr(CpuDevice, "driver_bytes", lambda device: self._driver())

    def _peak(self, run: Callable[[], object]) -> Peak:
        run()
        self.peaks += 1
        return Peak(self.peaks, 10 * self.peaks)

    def _driver(self) -> int:
        """Rises between the two calls around a capture."""
        self._driver_calls += 1
        if self._driver_calls % 2 == 0:
            self.driver += self._steps[(self._driver_calls // 2 - 1) % len(self._steps)]
        return self.driver


def test_measuring_of_graphs(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A phase has five captures: the largest bucket, then the smallest four times, of which the last three count.
    device = MeasuringDevice(monkeypatch, [900, 70, 1, 2, 4])
    with LLM(str(llama_folder), device="cpu", **SMALL) as llm:
        estimate = llm.memory_report().estimate
        taken = [bucket.driver_bytes for bucket in llm.memory_report().buckets]
    prefill, decode = estimate.phases
    assert [phase.driver_bytes_per_plan for phase in estimate.phases] == [3, 3]
    assert (prefill.num_plans, decode.num_plans, estimate.driver_bytes) == (2, 2, 12)
    assert (prefill.eager, prefill.replay, decode.eager, decode.replay) == (
        Peak(1, 10), Peak(2, 20), Peak(3, 30), Peak(4, 40),
    )  # fmt: skip
    assert (estimate.sampler, device.peaks) == (Peak(5, 50), 5)
    assert taken == [900, 70, 1, 2]


def test_each_phase_is_measured_alone(llama_folder: Path, device: torch.device) -> None:
    with LLM(str(llama_folder), device=str(device), **SMALL) as llm:
        both = llm.memory_report().estimate
    alone = {}
    for phase, other in (("prefill", "decode"), ("decode", "prefill")):
        with LLM(str(llama_folder), device=str(device), **SMALL, **{f"{other}_backend": "eager"}) as llm:
            alone[phase] = next(p for p in llm.memory_report().estimate.phases if p.phase == phase)
    assert {p.phase: p.pool_peak_bytes for p in both.phases} == {p: a.pool_peak_bytes for p, a in alone.items()}
    assert both.pool_bytes == max(a.pool_bytes for a in alone.values())


@pytest.mark.parametrize(
    ("options", "runs_eagerly"),
    [
        ({}, [False, False]),
        ({"prefill_buckets": (4,)}, [True, False]),
        ({"decode_buckets": (2,)}, [False, True]),
        ({"decode_backend": "eager"}, [False, True]),
    ],
)
def test_which_phases_keep_eager_steps(
    llama_folder: Path, device: torch.device, options: dict[str, Any], runs_eagerly: list[bool]
) -> None:
    engine = load_engine(EngineConfig(model=str(llama_folder), device=str(device), **{**ENGINE, **options}))
    assert [phase.runs_eagerly for phase in engine.memory.phases] == runs_eagerly
    engine.close()


def test_a_capture_reserves_what_was_measured_and_gives_the_rest_back(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(EngineConfig(model=str(llama_folder), device=str(device), **ENGINE))
    calls: list[Any] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            calls.append((name, args, options) if name == "reserve" else name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    noted(engine.family, "reserve")
    noted(engine.family, "capture")
    noted(engine.family.device, "release_cached")
    engine.capture()
    assert calls == [
        ("reserve", engine.memory.pool_runs, {"output_bytes": engine.memory.output_bytes}), "release_cached",
        *["capture"] * 4, "release_cached",
    ]  # fmt: skip
    engine.close()
