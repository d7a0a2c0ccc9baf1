"""What only CUDA shows about memory: torch's allocator, the driver, and whether the KV cache leaves enough."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from breakgraph import LLM, SamplingParams
from breakgraph.engine.device_memory import measure_sampler
from breakgraph.graph import AllocationTrace, PlanFamily, eager_on_graph, get_device
from breakgraph.graph.cuda_pool import snapshot_of
from breakgraph.graph.packing import pool_bytes

CUDA = torch.device("cuda")
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def family() -> Iterator[PlanFamily]:
    made = PlanFamily(CUDA)
    yield made
    made.close()


@eager_on_graph
def with_scratch(x: Tensor) -> Tensor:
    scratch = torch.empty(256 * MIB, dtype=torch.uint8, device=CUDA)
    return x + scratch[0] * 0


def test_memory_of_breaks_is_not_the_plans(family: PlanFamily) -> None:
    x = torch.zeros(8 * MIB, device=CUDA)
    keep = []

    @eager_on_graph
    def keeps(t: Tensor) -> Tensor:
        keep.append(torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA))  # stays, across segments
        return t + 1

    with torch.no_grad():
        report = family.capture(lambda: with_scratch(keeps(x + 1) * 2) + 1).explain()
    # Two tensors of 32 MiB at a time: a break's boundary and its reader's result, or an argument and the boundary.
    assert report.pool_peak_bytes == 2 * 32 * MIB
    assert len(keep) == 2


def test_looking_at_a_pool_takes_no_references() -> None:
    """Small numbers are one object each, for ever: only those above 256 can die."""
    pools = (torch.cuda.MemPool().id for _ in range(600))
    arguments = (*next(numbers for numbers in pools if max(numbers) > 256), False)
    before = [sys.getrefcount(argument) for argument in arguments]
    for _ in range(1000):
        snapshot_of(arguments[:2])
    after = [sys.getrefcount(argument) for argument in arguments]
    assert all(now > then - 500 for now, then in zip(after, before, strict=True))


def test_a_trace_played_back_needs_the_pool_that_the_capture_took(family: PlanFamily) -> None:
    x = torch.zeros(8 * MIB, device=CUDA)

    def fn() -> Tensor:
        wide = torch.cat([x, x, x])
        small = wide[:MIB] * 2
        narrow = wide[: 4 * MIB] + 1
        del wide
        return torch.cat([narrow, narrow, x])[:MIB] + small

    with torch.no_grad(), family.tracing() as events:
        report = family.capture(fn).explain()
    trace = AllocationTrace(tuple(events))
    assert trace.peak_bytes == report.pool_peak_bytes
    assert pool_bytes((), [trace]) == family.pool_bytes
    with PlanFamily(CUDA) as other:
        other.reserve(96 * MIB, 64 * MIB)
        assert other.pool_bytes == 160 * MIB
        other.reserve(96 * MIB, 64 * MIB)
        with torch.no_grad():
            other.capture(fn)
        assert pool_bytes((96 * MIB, 64 * MIB), [trace]) == other.pool_bytes


def test_the_warm_up_is_not_in_the_trace(family: PlanFamily) -> None:
    # Its memory goes back to the driver before the capture, which then hands the same addresses to the pool.
    x = torch.zeros(32 * MIB, device=CUDA)
    runs = []

    def fn() -> Tensor:
        runs.append(1)
        wide = torch.cat([x] * (3 if len(runs) == 1 else 1))
        return wide[:MIB] * 2

    with torch.no_grad(), family.tracing() as events:
        family.capture(fn)
    assert len(runs) == 2
    assert {size for _, size in events if size > MIB} == {128 * MIB, 4 * MIB}


def test_a_history_that_somebody_else_records_is_left_alone(family: PlanFamily) -> None:
    x = torch.zeros(MIB, device=CUDA)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    try:
        with torch.no_grad(), family.tracing() as events:
            family.capture(lambda: x + 1)
        assert events == []
        assert any(torch.cuda.memory._snapshot()["device_traces"])
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_memory_that_operators_take_for_themselves_counts(family: PlanFamily) -> None:
    x = torch.randn(1 << 24, device=CUDA)
    with torch.no_grad():
        report = family.capture(lambda: x.sort().values[:1].clone()).explain()
    # Sorted values and int64 indices are what Python sees; a radix sort needs more.
    assert report.pool_peak_bytes > (4 + 8) << 24
    assert report.pool_peak_bytes <= family.pool_bytes


def test_the_peak_does_not_depend_on_what_else_is_allocated(family: PlanFamily) -> None:
    x = torch.zeros(MIB, device=CUDA)

    def fn() -> Tensor:
        a = x + 1
        b = a * 2
        return a + b

    with torch.no_grad():
        first = family.capture(fn).explain()
        others = [torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA) for _ in range(3)]
        del others[1]
        torch.empty(500 * MIB, dtype=torch.uint8, device=CUDA)
        again = family.capture(fn).explain()
    assert first.pool_peak_bytes == again.pool_peak_bytes == 3 * 4 * MIB


def test_a_peak_is_of_the_run_alone() -> None:
    device = get_device(CUDA)
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    torch.empty(512 * MIB, dtype=torch.uint8, device=CUDA)  # an earlier peak, and cached memory

    def run() -> None:
        one = torch.empty(32 * MIB, dtype=torch.uint8, device=CUDA)
        two = torch.empty(16 * MIB, dtype=torch.uint8, device=CUDA)
        del one, two
        torch.empty(40 * MIB, dtype=torch.uint8, device=CUDA)

    peak = device.peak_of(run)
    assert peak.allocated_bytes == 48 * MIB
    assert peak.reserved_bytes is not None
    assert 48 * MIB <= peak.reserved_bytes <= 90 * MIB
    assert held.numel()


def test_the_driver_takes_memory_for_graphs(family: PlanFamily) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(200)]).to(CUDA)
    x = torch.randn(16, 256, device=CUDA)
    device = get_device(CUDA)
    with torch.no_grad():
        family.capture(lambda: model(x))
        before = device.driver_bytes()
        taken = [family.capture(lambda: model(x)).explain().driver_bytes for _ in range(40)]
        after = device.driver_bytes()
    assert before is not None
    assert after is not None
    # 40 plans of 200 nodes and more, some kilobytes a node.
    assert 8 * MIB < sum(t or 0 for t in taken) <= after - before + 4 * MIB


def test_the_sampler_takes_several_copies_of_its_logits() -> None:
    peak = measure_sampler(CUDA, 16, 100_000, torch.bfloat16)
    assert peak.allocated_bytes is not None
    assert peak.allocated_bytes > 4 * (16 * 100_000 * 4)


def test_memory_torch_reserved_is_what_the_engine_says(tmp_path: Path) -> None:
    """After a capture torch holds weights, KV cache, pool, outputs and inputs, and nothing to speak of beside."""
    save_config(tmp_path, layers=4)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with LLM(str(tmp_path), **OPTIONS, num_gpu_blocks_override=2000) as llm:
        report = llm.memory_report()
        held = torch.cuda.memory_reserved() - before
    known = report.weight_bytes + report.kv_cache_bytes + report.pool_bytes + report.output_bytes + report.input_bytes
    # Small tensors share segments, and cuBLAS has a workspace of 32 MiB and more for each stream.
    assert known - 64 * MIB <= held <= known + 192 * MIB
    assert report.estimate.pool_bytes <= report.pool_bytes <= 1.1 * report.estimate.pool_bytes + 24 * MIB
    assert report.driver_bytes is not None
    assert report.driver_bytes >= 0
    peak, avoided = report.estimate.activation_peak_bytes, report.estimate.activation_peak_avoided_bytes
    assert peak is not None
    assert avoided is not None
    assert 0 <= avoided <= peak


OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 4096,
    "max_num_batched_tokens": 2048, "max_num_seqs": 64, "prefill_buckets": (256, 1024, 2048),
    "decode_buckets": (8, 64), "use_tqdm": False,
}  # fmt: skip


def save_config(folder: Path, layers: int) -> None:
    LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip


@pytest.mark.parametrize("buckets", [(256, 1024, 2048), (256,)], ids=["through the chunk size", "below it"])
def test_the_kv_cache_leaves_enough_for_every_step(tmp_path: Path, buckets: tuple[int, ...]) -> None:
    """On a device that is filled until the KV cache has to be cut. Replays never make torch free what it caches, which
    it does before it gives up; eager steps of changing sizes may."""
    save_config(tmp_path, layers=24)  # 48 KiB of KV a token: 12 GiB for 64 requests of 4096 tokens
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - 8 * GIB, dtype=torch.uint8, device=CUDA)
    options = {**OPTIONS, "prefill_buckets": buckets}
    with LLM(str(tmp_path), **options, gpu_memory_utilization=1.0) as llm:
        stats = llm.stats()
        assert stats["num_kv_blocks"] < 64 * 256  # cut, and yet most of what is left
        assert stats["kv_cache_bytes"] > 3 * GIB
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=100, min_p=0.01, max_tokens=6, ignore_eos=True)
        room = (stats["num_kv_blocks"] - 1) // 256
        prompts = [list(range(1, 4000))] * room + [[1, 2, 3]] * (64 - room)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
        if buckets[-1] == 2048:
            assert torch.cuda.memory_stats()["num_alloc_retries"] == retries
        assert (llm.stats()["runners"]["prefill"]["num_eager_steps_by_reason"] != {}) == (buckets[-1] < 2048)
    del filler
