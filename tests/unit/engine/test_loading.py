"""What `load_engine` makes, and that nothing of it stays when a later part fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from breakgraph.attention import KVCacheBuffers
from breakgraph.engine import loading
from breakgraph.engine.config import EngineConfig
from breakgraph.engine.kv_cache import KVDemand
from breakgraph.engine.loading import load_engine
from breakgraph.errors import ClosedError, ConfigError, ModelNotFoundError, UnknownNameError
from breakgraph.graph import AllocationTrace, Peak, PlanFamily
from breakgraph.runners import PhaseMemory, Runner
from unit.engine.small import SMALL

OPTIONS = {name: value for name, value in SMALL.items() if name not in ("use_tqdm", "num_gpu_blocks_override")}
# As many blocks as can be in use, on any device.
OPTIONS["enable_prefix_caching"] = False


def config_for(folder: Path, device: torch.device, **options: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(folder), "device": str(device), **OPTIONS, **options})


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[PlanFamily]:
    """The plan families that loading makes."""
    seen: list[PlanFamily] = []

    def make(device: torch.device) -> PlanFamily:
        seen.append(PlanFamily(device))
        return seen[-1]

    monkeypatch.setattr(loading, "PlanFamily", make)
    return seen


def test_an_engine_is_ready_to_capture_and_has_captured_nothing(llama_folder: Path, device: torch.device) -> None:
    engine = load_engine(config_for(llama_folder, device))
    assert engine.explain() == {}
    assert engine.stats()["pool_bytes"] == 0
    assert {phase: runner.spec.ladder for phase, runner in engine.runners.items()} == {
        "prefill": (4, 16),
        "decode": (2, 8),
    }
    # 8 requests of 128 tokens in blocks of 16, and the reserved one
    assert engine.stats()["num_kv_blocks"] == 65
    assert engine.kv is not None
    # 2 layers, keys and values, 65 blocks of 16 tokens, 2 heads of 16 float32
    assert engine.kv.num_bytes == engine.stats()["kv_cache_bytes"] == 2 * 2 * 65 * 16 * 2 * 16 * 4
    engine.close()


def test_an_engine_that_has_not_captured_runs_eagerly_and_says_so(llama_folder: Path, device: torch.device) -> None:
    from breakgraph import SamplingParams

    engine = load_engine(config_for(llama_folder, device))
    engine.add(engine.make_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=3)))
    while engine.has_requests:
        engine.step()
    runners = engine.stats()["runners"]
    assert runners["prefill"]["num_eager_steps_by_reason"] == {"not_captured": 1}
    assert runners["decode"]["num_eager_steps_by_reason"] == {"not_captured": 2}
    engine.close()


def test_measuring_needs_the_reserved_block_only(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    measured: list[int] = []
    runners: list[Runner] = []
    measure, allocate = Runner.measure_memory, KVCacheBuffers.allocate

    def measure_and_count(runner: Runner, num_long_reqs: int) -> PhaseMemory:
        with FlopCounterMode(display=False) as counter:
            memory = measure(runner, num_long_reqs)
        measured.append(counter.get_total_flops())
        runners.append(runner)
        assert allocated == [1]
        assert num_long_reqs == 8
        return memory

    def allocate_and_note(layers: Any, num_blocks: int, *args: Any) -> KVCacheBuffers:
        allocated.append(num_blocks)
        return allocate(layers, num_blocks, *args)

    monkeypatch.setattr(Runner, "measure_memory", measure_and_count)
    monkeypatch.setattr(KVCacheBuffers, "allocate", allocate_and_note)
    engine = load_engine(config_for(llama_folder, device))
    # Each token goes through at least the two 64 x 96 matrices of a layer's way up and back.
    assert measured[0] > 16 * 2 * (2 * 64 * 96) * 2
    assert measured[1] > 8 * 2 * (2 * 64 * 96) * 2
    assert allocated == [1, 65]
    for runner in runners:
        with pytest.raises(ClosedError):
            runner.warm_up()
    assert engine.memory.pool_bytes == max(phase.pool_bytes for phase in engine.memory.phases) > 0
    engine.close()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_prefixes_may_fill_the_memory_of_a_gpu_only(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, enable_prefix_caching: bool
) -> None:
    demands: list[KVDemand] = []

    def choose(demand: KVDemand, available_bytes: int, override: int | None) -> int:
        demands.append(demand)
        return 65

    monkeypatch.setattr(loading, "choose_num_blocks", choose)
    load_engine(config_for(llama_folder, device, enable_prefix_caching=enable_prefix_caching)).close()
    assert [demand.fill_memory for demand in demands] == [enable_prefix_caching and device.type == "cuda"]


@pytest.mark.parametrize(
    ("options", "num_long_reqs"),
    [({}, 8), ({"max_num_seqs": 3, "decode_buckets": (2,)}, 3)],
)
def test_long_requests_are_no_more_than_can_run(
    llama_folder: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    num_long_reqs: int,
) -> None:
    plans = plan_inputs(monkeypatch)
    load_engine(config_for(llama_folder, device, **options)).close()
    assert set(plans) == {num_long_reqs}


def test_long_requests_are_no_more_than_fit_in_memory(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plan_inputs(monkeypatch)
    # 128 tokens of 2 layers, keys and values, 2 heads of 16 float32
    one = 128 * 2 * 2 * 2 * 16 * 4
    for free, expected in ((5 * one, 5), (one // 2, 1)):
        monkeypatch.setattr(loading, "free_bytes", lambda device, free=free: free)
        plans.clear()
        load_engine(config_for(llama_folder, device)).close()
        assert set(plans) == {expected}


def plan_inputs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What measuring is told, from now on."""
    seen: list[int] = []
    measure = Runner.measure_memory

    def note(runner: Runner, num_long_reqs: int) -> PhaseMemory:
        seen.append(num_long_reqs)
        return measure(runner, num_long_reqs)

    monkeypatch.setattr(Runner, "measure_memory", note)
    return seen


@pytest.mark.parametrize(("runs", "are_taken"), [((20 << 20, 24 << 20), True), ((300 << 20, 40 << 20), False)])
def test_a_pool_is_cut_into_runs_only_where_that_is_seen_to_need_less(
    llama_folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, runs: tuple[int, ...], are_taken: bool
) -> None:
    measure = Runner.measure_memory
    monkeypatch.setattr(
        Runner, "measure_memory", lambda runner, n: replace(measure(runner, n), pool_bytes=200 << 20)
    )  # alone
    seen: list[int] = []

    def choose(traces: list[AllocationTrace]) -> tuple[int, ...]:
        seen.extend(trace.peak_bytes for trace in traces)
        return runs

    monkeypatch.setattr(loading, "choose_runs", choose)
    engine = load_engine(config_for(llama_folder, device))
    # Two buckets a phase, none with a tensor that is large.
    assert seen == [0] * 4
    if are_taken:
        assert engine.memory.pool_runs == runs
        assert sum(runs) <= engine.memory.pool_bytes < 200 << 20
    else:
        assert (engine.memory.pool_runs, engine.memory.pool_bytes) == ((200 << 20,), 200 << 20)
    engine.close()


def warnings_of(folder: Path, device: torch.device, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    load_engine(config_for(folder, device, **options)).close()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_f34_a_ladder_below_the_largest_step_warns_once_with_the_peak_that_it_keeps(
    llama_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    assert warnings_of(llama_folder, cpu, caplog) == []
    text = (
        "prefill_buckets: the largest bucket is 4, the scheduler can send 16: larger steps run eagerly, are counted, "
        "and keep an activation peak {} beside the graphs; end the list with 16"
    )
    assert warnings_of(llama_folder, cpu, caplog, prefill_buckets=(4,)) == [
        text.format("(not measured on the emulated device)")
    ]
    measure = Runner.measure_memory
    monkeypatch.setattr(
        Runner,
        "measure_memory",
        lambda runner, n: replace(measure(runner, n), eager=Peak(3 << 29, 2 << 30)),
    )
    assert warnings_of(llama_folder, cpu, caplog, prefill_buckets=(4,)) == [text.format("of 1.50 GiB")]
    # Who captures nothing in this phase has not chosen that.
    assert warnings_of(llama_folder, cpu, caplog, prefill_buckets=(4,), prefill_backend="eager") == []


def test_buckets_that_nothing_reaches_warn_once(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(llama_folder, torch.device("cpu"), caplog, decode_buckets=(2, 8, 16)) == [
        "decode_buckets: buckets [16] are never used: the scheduler sends 8 at most"
    ]


@pytest.mark.parametrize(
    "part",
    ["make_attention", "_measure", "measure_sampler", "_allocate_kv", "_make_runners", "_make_scheduler", "Sampler"],
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_half_way_closes_what_was_made(
    llama_folder: Path,
    device: torch.device,
    families: list[PlanFamily],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    error: type[BaseException],
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("injected")

    monkeypatch.setattr(loading, part, fail)
    with pytest.raises(error, match="injected"):
        load_engine(config_for(llama_folder, device))
    for family in families:
        with pytest.raises(ClosedError):
            family.capture(lambda: torch.zeros(1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_len": 513}, ConfigError, "max_model_len=513 is beyond the 512 positions"),
        ({"decode_backend": "fast"}, UnknownNameError, "unknown backend 'fast'"),
        ({"prefill_buckets": (16, 4)}, ConfigError, "prefill_buckets: expected an ascending list"),
        ({"model": "/no/such/model"}, ModelNotFoundError, "no model at '/no/such/model'"),
        ({"model": "qwen3-0.6b"}, ConfigError, "use load_format='dummy'"),
        ({"prefill_request_slots": 2}, ConfigError, "is for prefill_backend='full' or 'auto'; with 'breakable' a"),
    ],
)
def test_what_cannot_be_had_is_refused(
    llama_folder: Path, device: torch.device, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_engine(config_for(llama_folder, device, **options))


def test_every_choice_is_in_the_log(llama_folder: Path, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="breakgraph"):
        load_engine(config_for(llama_folder, device)).close()
    for choice in ("device=", "dtype=float32: ", "attention=sdpa", "memory: graphs take", "65 KV blocks of 16 tokens"):
        assert choice in caplog.text
