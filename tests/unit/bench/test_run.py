"""Whole benchmarks on the CPU device: what is asked for is run, nothing is timed; and, with ceilings made up, timed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from breakgraph.bench import arms, comparison, serve
from breakgraph.bench.capture import measure as measure_capture
from breakgraph.bench.ceilings import Ceilings, step_work
from breakgraph.bench.config import BenchConfig, CaptureBench, DecodeBench, PrefillBench, ServeBench
from breakgraph.bench.profiler import GpuProfile, KernelTime
from breakgraph.bench.result import Metric, Result, Row, from_json, to_json
from breakgraph.bench.run import run_bench, with_ratios
from breakgraph.errors import ConfigError, ModelNotFoundError
from unit.bench.conftest import TINY_CEILINGS, MakeSetting

SPEED_UNITS = {"ms", "s", "us", "tokens/s", "GB/s", "TFLOP/s"}
SMALL: dict[type[BenchConfig], dict[str, Any]] = {
    PrefillBench: {"tokens": (8, 20), "requests": (1, 3), "rounds": 2},
    DecodeBench: {"batch": (1, 2), "context": (20,), "rounds": 2},
    ServeBench: {
        "num_requests": 3, "prompt_len": 12, "answer_len": 4, "max_num_batched_tokens": 16, "rounds": 1,
        "backends": ("eager", "breakable"),
    },
    CaptureBench: {"max_num_batched_tokens": 16, "max_num_seqs": 2, "prefill_buckets": (4, 16), "max_model_len": 64},
}  # fmt: skip


def small(kind: type[BenchConfig], folder: str, **options: Any) -> BenchConfig:
    return kind(model=folder, device="cpu", **(SMALL[kind] | options))


def run(config: BenchConfig) -> tuple[Result, list[str]]:
    lines: list[str] = []
    return run_bench(config, "a test", lines.append), lines


@pytest.mark.parametrize("kind", SMALL)
def test_the_cpu_device_claims_no_speed(kind: type[BenchConfig], tiny_folder: str) -> None:
    result, lines = run(small(kind, tiny_folder))
    assert result.where.emulated
    assert result.shape.model == "tiny-llama"
    assert any(line.startswith("emulated: ") for line in lines)
    units = {metric.unit for row in result.rows for metric in row.metrics.values()}
    assert not units & SPEED_UNITS
    assert not [row for row in result.rows if row.name == "ceiling"]
    assert from_json(to_json(result)) == result


def test_prefill_runs_each_step_on_each_backend(tiny_folder: str) -> None:
    result, _ = run(small(PrefillBench, tiny_folder))
    cases = [(row.params["tokens"], row.params["requests"], row.params["backend"]) for row in result.rows]
    backends = ("eager", "breakable", "full")
    assert cases == [(t, r, b) for t in (8, 20) for r in (1, 3) for b in backends]
    by_backend = {row.params["backend"]: row.metrics for row in result.rows}
    assert (by_backend["breakable"]["breaks"].value, by_backend["full"]["breaks"].value) == (2, 0)
    assert all(row.metrics["equals_eager"].value for row in result.rows if row.params["backend"] != "eager")
    assert all(row.metrics["off_full"].value < 1e-5 for row in result.rows if row.params["backend"] == "breakable")
    assert {row.params["attention"] for row in result.rows} == {"sdpa"}


def test_decode_counts_the_bytes_that_are_read(tiny_folder: str) -> None:
    result, _ = run(small(DecodeBench, tiny_folder))
    sizes = {row.params["requests"]: row.metrics["bytes"].value for row in result.rows}
    kv_of_a_request = 21 * 2 * 2 * 32 * 4
    embedding_row = 64 * 4
    assert sizes[2] - sizes[1] == kv_of_a_request + embedding_row
    assert all(row.metrics["equals_eager"].value for row in result.rows if row.params["backend"] != "eager")


def test_serving_counts_replays(tiny_folder: str) -> None:
    eager, breakable = run(small(ServeBench, tiny_folder))[0].rows
    assert (eager.params["decode_backend"], breakable.params["decode_backend"]) == ("eager", "full")
    assert eager.metrics["graph_hit_rate"].value == 0
    assert breakable.metrics["graph_hit_rate"].value == 100
    # Chunks of 16 tokens: three with a prompt in them, and the last one leaves three steps to the last answer.
    assert breakable.metrics["replays"].value == eager.metrics["eager_steps"].value == 6
    assert breakable.metrics["answer_tokens"].value == 12


def test_capture_has_totals_buckets_and_steps(tiny_folder: str) -> None:
    result, _ = run(small(CaptureBench, tiny_folder, backends=("breakable",)))
    (total,) = [row for row in result.rows if row.name == "capture"]
    buckets = [(row.params["phase"], row.params["bucket"]) for row in result.rows if row.name == "bucket"]
    assert buckets == [("prefill", 16), ("prefill", 4), ("decode", 2), ("decode", 1)]
    assert total.metrics["buckets"].value == 4
    growth = sum(row.metrics["pool_growth"].value for row in result.rows if row.name == "bucket")
    assert total.metrics["pool"].value >= growth > 0
    steps = [row.params["step"] for row in result.rows if row.name == "step" and row.params["phase"] == "prefill"]
    assert steps == ["0", "attend", "1", "attend", "2"]


@pytest.mark.parametrize("ceilings", [None, TINY_CEILINGS])
def test_a_comparison_builds_and_replays_each_way(
    tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch, ceilings: Ceilings | None
) -> None:
    """All but Inductor's pieces, which take a while on a CPU; fused layers are traced and not compiled there."""
    ways = tuple(arm for arm in comparison.ARMS if arm.backend != "tc_piecewise_inductor")
    monkeypatch.setattr(comparison, "ARMS", ways)
    config = CaptureBench(model=tiny_folder, device="cpu", compare=True, prefill_buckets=(4, 16), max_num_seqs=2)
    rows = list(measure_capture(make_setting(config, ceilings)))
    built = {(row.params["backend"], row.params["fusion"]): row.metrics for row in rows if row.name == "build"}
    replayed = {(row.params["backend"], row.params["fusion"]): row.metrics for row in rows if row.name == "replay"}
    unfused = [("eager", "none"), ("tc_piecewise", "none"), ("breakable", "none"), ("full", "none")]
    assert list(built) == list(replayed) == [*unfused, ("breakable", "inductor")]
    assert [built[way]["buckets"].value for way in built] == [0, 2, 2, 2, 2]
    counts = {way: (replayed[way]["graphs"].value, replayed[way]["breaks"].value) for way in built if way[0] != "eager"}
    assert set(counts.values()) == {(3, 2), (1, 0)}
    assert counts["full", "none"] == (1, 0)
    assert all(metrics["equals_eager"].value for way, metrics in replayed.items() if way[0] != "eager")
    assert all(metrics["off_eager"].value < 1e-5 for metrics in replayed.values())
    assert all(metrics["own_lines"].value > 0 for metrics in built.values())
    for way, metrics in built.items():
        is_timed = ceilings is not None
        assert ("build" in metrics) == (is_timed and way[0] != "eager")
        assert ("time" in replayed[way]) == is_timed
    if ceilings is not None:
        compiling = {way: metrics["compile"].value for way, metrics in built.items() if "compile" in metrics}
        assert {way for way, seconds in compiling.items() if seconds} == {
            ("tc_piecewise", "none"), ("breakable", "inductor")
        }  # fmt: skip


@pytest.mark.parametrize("kind", SMALL)
def test_with_ceilings_every_kind_is_timed(
    kind: type[BenchConfig], tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU would go through; the profiler finds no kernels here, so the busy time is made up too."""
    kernels = [KernelTime(f"kernel {index}", 14.0 - index, 2) for index in range(14)]
    profile = lambda run, device, rounds=3: run() is not None and GpuProfile(0.5, kernels)  # noqa: E731
    monkeypatch.setattr(arms, "gpu_profile", profile)
    monkeypatch.setattr(serve, "gpu_profile", profile)
    config = small(kind, tiny_folder)
    rows = list(import_module(f"breakgraph.bench.{config.kind}").measure(make_setting(config, TINY_CEILINGS)))
    check_kernels([row for row in rows if row.name == "kernel"], config)
    ahead = [row for row in rows if "one_ahead" in row.metrics]
    assert all(row.metrics["one_ahead_over_bytes_floor"].value > 0 for row in ahead)
    captured = [row for row in rows if row.name == "decode" and row.params["backend"] != "eager"]
    assert ahead == captured
    assert all(row.metrics["gpu_busy"].value == 0.5e-3 for row in rows if row.name == "serve")
    timed = [row for row in rows if row.name != "step"]
    assert timed
    assert all(row.metrics["time"].value > 0 for row in timed)
    for row in rows:
        floor = {"prefill": "over_roofline", "decode": "over_bytes_floor"}.get(row.name)
        if floor is not None:
            assert row.metrics[floor].value > 0
            assert row.metrics["over_gpu_busy"].value == row.metrics["time"].value / 0.5
    assert all(row.metrics["start"].value > row.metrics["time"].value for row in rows if row.name == "capture")
    hosts = [row for row in rows if row.name == "step" and row.metrics["nodes"].value]
    assert all(row.metrics["host"].value > 0 for row in hosts)


def check_kernels(rows: list[Row], config: BenchConfig) -> None:
    """The longest by name and the rest as one, of one backend a case; of serving, each backend is a case."""
    assert bool(rows) != isinstance(config, CaptureBench)
    cases: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault(tuple(value for name, value in row.params.items() if name != "kernel"), []).append(row)
        first = next(name for name in config.backends if name != "eager")
        assert row.params["backend"] == first or isinstance(config, ServeBench)
    for found in cases.values():
        assert [row.params["kernel"] for row in found] == [*(f"kernel {index}" for index in range(12)), "others"]
        assert [row.metrics["time"].value for row in found[-2:]] == [3.0, 2.0 + 1.0]
        assert found[-1].metrics["calls"].value == 4
        assert sum(row.metrics["share"].value for row in found) == pytest.approx(100)


def test_the_time_of_a_batch_is_at_least_that_of_its_steps(tiny_folder: str, make_setting: MakeSetting) -> None:
    from breakgraph.bench.arms import shape_only
    from breakgraph.bench.serve import _roofline_sec

    config = ServeBench(model=tiny_folder, num_requests=5, prompt_len=8, answer_len=3, max_num_seqs=3,
                        max_num_batched_tokens=16)  # fmt: skip
    model = shape_only(make_setting(config, TINY_CEILINGS))
    prompts = [[8, 8], [8, 8], [8]]
    decodes = [[8 + answered] * running for running in (3, 2) for answered in (1, 2)]
    expected = sum(TINY_CEILINGS.floor_ms(step_work(model, lens, lens)) for lens in prompts)
    expected += sum(TINY_CEILINGS.floor_ms(step_work(model, [1] * len(lens), lens)) for lens in decodes)
    assert _roofline_sec(config, TINY_CEILINGS, model) == pytest.approx(expected / 1e3)


def test_a_pair_that_cannot_be_is_named_and_the_rest_runs(
    tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakgraph.attention.sdpa import SdpaAttention

    monkeypatch.setattr(SdpaAttention, "graph_support", lambda self, phase: "none")
    config = small(PrefillBench, tiny_folder, attention=("sdpa",), peers=("none",), tokens=(8,), requests=(1,))
    result, lines = run(config)
    assert {row.params["backend"] for row in result.rows} == {"eager", "breakable"}
    (said,) = [note for note in result.notes if note.startswith("not run")]
    assert said.startswith("not run: full with attention sdpa: prefill with backend 'full' needs an attention with")
    assert said in lines
    with pytest.raises(ConfigError, match="nothing of what was asked for could run: not run: full with attention sdpa"):
        run(small(PrefillBench, tiny_folder, attention=("sdpa",), backends=("full",)))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"model": "/no/such/model"}, ModelNotFoundError, "no model at '/no/such/model'"),
        ({"device": "cuda:99"}, ConfigError, "device='cuda:99', but torch sees"),
        ({"tokens": (2048,), "requests": (1,)}, ConfigError, "has 512 positions, got requests of 2048 tokens"),
        ({"attention": ("flash",)}, ConfigError, "attention='flash' cannot serve"),
    ],
)
def test_what_cannot_be_had_is_refused(
    tiny_folder: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    values = {"model": tiny_folder, "device": "cpu"} | SMALL[PrefillBench] | options
    with pytest.raises(error) as refused:
        run(PrefillBench(**values))
    assert said in str(refused.value)


def test_a_backend_that_captures_nothing_has_no_ladder(tiny_folder: str) -> None:
    with pytest.raises(ConfigError, match="not run: eager: it captures nothing"):
        run(small(CaptureBench, tiny_folder, backends=("eager",)))


def test_fused_and_not_are_two_arms(tiny_folder: str, make_setting: MakeSetting) -> None:
    config = small(PrefillBench, tiny_folder, tokens=(8,), requests=(1,), fusion=("none", "inductor"))
    rows = run(config)[0].rows
    nodes = {row.params["fusion"]: row.metrics["nodes"].value for row in rows if row.params["backend"] == "full"}
    assert nodes["inductor"] < nodes["none"]
    arms_found = [(row.params["fusion"], row.params["backend"]) for row in rows]
    assert arms_found == [(f, b) for f in ("none", "inductor") for b in ("eager", "breakable", "full")]
    assert all(row.metrics["equals_eager"].value for row in rows if row.params["backend"] != "eager")


def test_fusion_leaves_the_work_of_a_step_as_it_was(tiny_folder: str, make_setting: MakeSetting) -> None:
    setting = make_setting(small(PrefillBench, tiny_folder), None)
    plain, fused = (step_work(arms.load(setting, fusion), [3, 5], [3, 9]) for fusion in ("none", "inductor"))
    assert plain == fused


def test_an_engine_is_fused_too(tiny_folder: str, make_setting: MakeSetting) -> None:
    config = small(CaptureBench, tiny_folder, backends=("breakable",), fusion=("inductor",))
    rows, nodes = run(config)[0].rows, {}
    plain = run(small(CaptureBench, tiny_folder, backends=("breakable",)))[0].rows
    for name, of in (("fused", rows), ("plain", plain)):
        (nodes[name],) = [
            row.metrics["nodes"].value
            for row in of
            if row.name == "bucket" and (row.params["phase"], row.params["bucket"]) == ("prefill", 16)
        ]
    assert {row.params["fusion"] for row in rows} == {"inductor"}
    assert nodes["fused"] < nodes["plain"]  # query, key and value in one product


def test_logits_that_are_not_finite_prove_nothing(
    tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakgraph.models import HFModel

    forward = HFModel.forward

    def broken(self: HFModel, *args: torch.Tensor) -> torch.Tensor:
        return forward(self, *args) * float("nan")

    monkeypatch.setattr(HFModel, "forward", broken)
    config = small(PrefillBench, tiny_folder, tokens=(8,), requests=(1,), backends=("eager",))
    with pytest.raises(AssertionError, match="eager: logits are not finite"):
        list(import_module("breakgraph.bench.prefill").measure(make_setting(config, None)))


def test_a_full_graph_that_differs_is_seen(
    tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakgraph.backends.full import FullBackend

    config = small(PrefillBench, tiny_folder, tokens=(8,), requests=(1,))
    replay = FullBackend.replay
    monkeypatch.setattr(FullBackend, "replay", lambda self, key: 2 * replay(self, key))  # type: ignore[operator]
    rows = list(import_module("breakgraph.bench.prefill").measure(make_setting(config, None)))
    metrics = {row.params["backend"]: row.metrics for row in rows}
    assert metrics["breakable"]["equals_full"].value is False
    assert metrics["breakable"]["off_full"].value == pytest.approx(0.5, abs=1e-5)
    assert metrics["breakable"]["equals_eager"].value is True
    assert metrics["full"]["equals_eager"].value is False


def test_kernels_that_add_in_any_order_are_said_so(
    tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakgraph.runners import Runner

    padded = Runner.run_padded_eager
    monkeypatch.setattr(Runner, "run_padded_eager", lambda self, batch: padded(self, batch) + torch.rand(()))
    config = small(PrefillBench, tiny_folder, tokens=(8,), requests=(1,), backends=("breakable",))
    (only,) = import_module("breakgraph.bench.prefill").measure(make_setting(config, None))
    assert "equals_eager" not in only.metrics
    assert only.metrics["eager_repeats"].value is False


def row(backend: str, time: float, fusion: str = "none", attention: str = "triton", tokens: int = 8) -> Row:
    params = {"tokens": tokens, "requests": 1, "backend": backend, "fusion": fusion, "attention": attention}
    return Row(name="prefill", params=params, metrics={"time": Metric(value=time, unit="ms")})


def test_ratios_are_to_plain_eager_of_the_same_case() -> None:
    rows = [
        row("eager", 4.0, "inductor"), row("eager", 8.0), row("full", 2.0), row("full", 1.0, fusion="inductor"),
        row("eager", 16.0, attention="flash"), row("full", 2.0, attention="flash"), row("torch.compile", 4.0, "x", "y"),
        row("full", 2.0, tokens=16),
    ]  # fmt: skip
    ratios = [one.metrics.get("eager_over_time") for one in with_ratios(rows)]
    assert [ratio and ratio.value for ratio in ratios] == [2.0, 1.0, 4.0, 8.0, 1.0, 8.0, 2.0, None]
