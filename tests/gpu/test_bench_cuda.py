"""Benchmarks of a tiny model on a GPU: ceilings come first, every row is timed, and the profiler finds the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from breakgraph.bench.config import BenchConfig, CaptureBench, DecodeBench, PrefillBench, ServeBench
from breakgraph.bench.result import Result, from_json, to_json
from breakgraph.bench.run import run_bench
from breakgraph.bench.trace import export
from breakgraph.graph import PlanFamily


@pytest.fixture
def folder(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return str(tmp_path)


def run(config: BenchConfig) -> tuple[Result, list[str]]:
    lines: list[str] = []
    result = run_bench(config, "a test", lines.append)
    assert from_json(to_json(result)) == result
    assert not result.where.emulated
    assert [row.name for row in result.rows[:2]] == ["ceiling", "ceiling"]
    assert all(line.startswith("ceiling") for line in lines[1:3])
    return result, lines


@pytest.mark.parametrize("config", [
    PrefillBench(tokens=(32, 100), requests=(1, 4), rounds=5, attention=("triton", "sdpa"), peers=("none",)),
    DecodeBench(batch=(1, 8), context=(100,), rounds=5, attention=("triton",)),
], ids=["prefill", "decode"])  # fmt: skip
def test_steps_are_timed_beside_what_the_gpu_needs(config: BenchConfig, folder: str) -> None:
    result, _ = run(type(config)(**{**vars(config), "model": folder}))
    kernels = [row for row in result.rows if row.name == "kernel"]
    rows = [row for row in result.rows[2:] if row not in kernels]
    assert {row.params["backend"] for row in rows} == {"eager", "breakable", "full"}
    assert kernels
    assert all(row.metrics["time"].value > 0 and row.metrics["calls"].value > 0 for row in kernels)
    for row in rows:
        values = {name: metric.value for name, metric in row.metrics.items()}
        assert 0 < values["gpu_busy"] < values["time"]
        assert values["p10"] <= values["time"] <= values["p90"]
        assert values.get("equals_eager", True)
        if row.params["attention"] == "triton":
            assert values.get("equals_full", True)
        assert values["eager_over_time"] > 0


def test_capture_has_times_and_driver_memory(folder: str) -> None:
    result, _ = run(CaptureBench(model=folder, max_num_batched_tokens=64, max_num_seqs=4, backends=("breakable",),
                                attention=("triton",)))
    buckets = [row for row in result.rows if row.name == "bucket"]
    assert buckets
    assert all(row.metrics["time"].value > 0 and "driver" in row.metrics for row in buckets)
    steps = [row for row in result.rows if row.name == "step"]
    assert all(row.metrics["host"].value > 0 for row in steps if row.metrics["nodes"].value)


def test_serving_beside_continuous_batching_of_transformers(folder: str) -> None:
    config = ServeBench(model=folder, num_requests=6, prompt_len=40, answer_len=8, max_num_batched_tokens=128,
                        rounds=1, backends=("breakable",), attention=("triton",), peers=("transformers",))  # fmt: skip
    result, _ = run(config)
    rows = {str(row.params.get("backend")): row for row in result.rows if row.name == "serve"}
    assert rows["breakable"].metrics["graph_hit_rate"].value == 100
    assert rows["breakable"].metrics["answer_rate"].value > 0
    assert rows["breakable"].metrics["gpu_busy"].value > 0
    kernels = {str(row.params["kernel"]): row.metrics["calls"].value for row in result.rows if row.name == "kernel"}
    assert kernels["decode_kernel"] > 0
    peer = rows["transformers continuous batching"]
    assert str(peer.params["attention"]).startswith("paged|")
    assert peer.metrics["answer_tokens"].value == 48


def test_the_compiled_body_beside_ours(folder: str) -> None:
    config = PrefillBench(model=folder, tokens=(64,), requests=(1,), rounds=5, backends=("full",),
                          attention=("triton",), peers=("torch.compile",))  # fmt: skip
    result, _ = run(config)
    (peer,) = [row for row in result.rows if row.params.get("backend") == "torch.compile, body only"]
    assert peer.metrics["time"].value > 0
    assert peer.metrics["compile"].value > 0


def test_a_trace_has_kernels_on_the_clock_of_the_steps(tmp_path: Path) -> None:
    x = torch.randn(512, 512, device="cuda")
    with PlanFamily("cuda") as family:
        plan = family.capture(lambda: (x @ x).relu() + 1)
        export(plan.replay, family, tmp_path / "trace.json")
    entries = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    kernels = [e for e in entries if e["pid"] == 2]
    assert [e["name"] for e in entries if e["pid"] == 1] == ["segment 0"]
    assert len(kernels) >= 2
    assert all(-10 < e["ts"] < 1e5 for e in kernels)
