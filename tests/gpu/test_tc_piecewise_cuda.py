"""Traced forwards on a GPU: pieces in CUDA graphs, Inductor's kernels in them, and all ways to capture side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import breakgraph
from breakgraph import LLM, SamplingParams
from breakgraph.backends import make_backend
from breakgraph.bench.config import CaptureBench
from breakgraph.bench.run import run_bench
from breakgraph.errors import StalePlanError
from breakgraph.graph import PlanFamily, ShapeKey
from breakgraph.runners import StepBatch

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 512, "max_num_batched_tokens": 64,
    "max_num_seqs": 8, "num_gpu_blocks_override": 300, "use_tqdm": False,
}  # fmt: skip
PROMPTS = [list(range(1, 1 + n)) for n in (3, 150, 40, 1, 65, 64, 200, 9, 30)]
COMMON: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None,
    "dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "dense": LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]),
    "experts": Qwen3MoeConfig(
        **COMMON, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}  # fmt: skip
TOLERANCE = 0.05
"""Of Inductor in bfloat16, over the largest logit."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    CONFIGS[request.param].save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("attention", ["auto", "flash"])
@pytest.mark.parametrize("backend", ["tc_piecewise", "tc_piecewise_inductor"])
def test_every_step_has_the_bits_of_its_own_eager(
    folder: str, monkeypatch: pytest.MonkeyPatch, backend: str, attention: str
) -> None:
    compared: list[str] = []
    options = {**OPTIONS, "prefill_backend": backend, "decode_backend": backend, "attention": attention}
    with LLM(folder, **options) as llm:
        for phase, runner in llm.engine.runners.items():

            def run_both(batch: StepBatch, phase: str = phase, runner: Any = runner, run: Any = runner.run) -> Any:
                expected = runner.run_padded_eager(batch)
                llm.engine.family.poison()
                logits = run(batch)
                assert torch.equal(logits, expected), (phase, batch.q_lens)
                compared.append(phase)
                return logits

            monkeypatch.setattr(runner, "run", run_both)
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        assert set(compared) == {"prefill", "decode"}
        reports = llm.explain().values()
        assert {report.num_breaks for report in reports} == {3}
        assert all(step.num_nodes for report in reports for step in report.steps if step.kind == "segment")


class Block(nn.Module):
    """Much for Inductor to fuse, on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(x)) * 1.5 - 0.25
        hidden = in_order(hidden.tanh() + hidden)
        return x + self.down(hidden.sigmoid() * hidden)


@breakgraph.eager_on_graph
def in_order(hidden: Tensor) -> Tensor:
    return hidden.cumsum(0) / hidden.abs().max().item()


@pytest.fixture
def family() -> Iterator[PlanFamily]:
    with PlanFamily("cuda") as family:
        yield family


def test_inductor_makes_fewer_nodes_and_nearly_the_same_numbers(family: PlanFamily) -> None:
    torch.manual_seed(0)
    block, x = Block().cuda(), torch.randn(96, 64, device="cuda")
    forwards = {size: (lambda size=size: block(x[:size])) for size in (96, 40, 24)}
    nodes: dict[str, int] = {}
    for name in ("tc_piecewise", "tc_piecewise_inductor"):
        backend = make_backend(name, family)
        with torch.no_grad():
            for size, forward in forwards.items():
                backend.capture(ShapeKey("block", size), forward)
            for size, forward in forwards.items():
                x.normal_()
                family.poison()
                got, expected = backend.replay(ShapeKey("block", size)).clone(), forward()
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
                assert torch.equal(got, backend.reference(ShapeKey("block", size), forward)())
        nodes[name] = sum(step.num_nodes for step in backend.explain()[ShapeKey("block", 96)].steps)
    assert 0 < nodes["tc_piecewise_inductor"] < nodes["tc_piecewise"]


def test_what_inductors_kernels_read_is_kept_and_watched(family: PlanFamily) -> None:
    torch.manual_seed(0)
    block, x = Block().cuda(), torch.randn(32, 64, device="cuda")
    backend = make_backend("tc_piecewise_inductor", family)
    with torch.no_grad():
        backend.capture(ShapeKey("block", 32), lambda: block(x))
        block.up.weight.mul_(0.5)
        torch.testing.assert_close(backend.replay(ShapeKey("block", 32)), block(x), rtol=1e-4, atol=1e-5)
    num_bytes = sum(p.numel() * p.element_size() for p in block.parameters())
    assert backend.explain()[ShapeKey("block", 32)].pinned_bytes >= num_bytes
    block.down.weight = nn.Parameter(torch.zeros_like(block.down.weight))
    with pytest.raises(StalePlanError, match=r"down\.weight"):
        backend.replay(ShapeKey("block", 32))


@pytest.mark.parametrize("name", ["tc_piecewise", "tc_piecewise_inductor"])
def test_buckets_share_their_memory(family: PlanFamily, name: str) -> None:
    block, x = Block().cuda(), torch.randn(8192, 64, device="cuda")
    backend = make_backend(name, family)
    with torch.no_grad():
        backend.capture(ShapeKey("block", 8192), lambda: block(x))
        largest = family.pool_bytes
        for size in (4096, 2048, 1024):
            backend.capture(ShapeKey("block", size), lambda size=size: block(x[:size]))
    assert family.pool_bytes <= 1.3 * largest


def test_all_ways_side_by_side(folder: str) -> None:
    config = CaptureBench(model=folder, compare=True, prefill_buckets=(16, 128, 256), max_num_seqs=4)
    result = run_bench(config, "a test", lambda line: None)
    built = {(row.params["backend"], row.params["fusion"]): row.metrics for row in result.rows if row.name == "build"}
    assert list(built) == [
        ("eager", "none"), ("tc_piecewise", "none"), ("tc_piecewise_inductor", "none"), ("breakable", "none"),
        ("full", "none"), ("breakable", "inductor"),
    ]  # fmt: skip
    assert not [note for note in result.notes if note.startswith("not run")]
    for (backend, fusion), metrics in built.items():
        if backend != "eager":
            assert metrics["buckets"].value == 3
            assert metrics["pool"].value > 0
            assert (metrics["compile"].value > 0) == (backend.startswith("tc_piecewise") or fusion == "inductor")
            assert metrics["build"].value >= metrics["capture"].value > 0
    replays = [row for row in result.rows if row.name == "replay"]
    assert len(replays) == 12
    for row in replays:
        assert row.metrics["time"].value >= row.metrics["host"].value > 0
        assert row.metrics["off_eager"].value < TOLERANCE
        if row.params["backend"] != "eager" and "eager_repeats" not in row.metrics:
            assert row.metrics["equals_eager"].value
