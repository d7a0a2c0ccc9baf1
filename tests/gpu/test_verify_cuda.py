"""Verification where memory and streams are real: bf16 models, poisoned pools, segments taken apart on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

import breakgraph
from breakgraph import LLM, SamplingParams
from breakgraph.errors import VerificationError
from breakgraph.verify import Verdict, VerifyReport

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 512, "max_num_batched_tokens": 256,
    "max_num_seqs": 8, "num_gpu_blocks_override": 400, "use_tqdm": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return str(tmp_path)


@breakgraph.eager_on_graph
def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("backends", [{}, {"prefill_backend": "full"}, {"decode_backend": "breakable"}])
def test_every_bucket_of_a_model_is_equal_to_eager(folder: str, backends: dict[str, str]) -> None:
    with LLM(folder, **OPTIONS, **backends, verify="startup") as llm:
        cost = llm.stats()["verify"]["startup"]
        captured = [len(runner["captured_buckets"]) for runner in llm.stats()["runners"].values()]
    assert cost["ok"]
    assert cost["num_plans"] == sum(captured)
    assert cost["peak_bytes"] > 0
    assert cost["snapshot_bytes"] > 0


def test_a_sample_of_live_steps_changes_no_answer(folder: str) -> None:
    prompts = [list(range(1, 1 + n)) for n in (3, 150, 40, 65)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)

    def answers(verify: str | None) -> tuple[list[list[int]], dict[str, Any] | None]:
        with LLM(folder, **OPTIONS, verify=verify) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(o.outputs[0].token_ids) for o in outputs], llm.stats()["verify"]["live"]

    want, _ = answers(None)
    got, counts = answers("sample:1")
    assert got == want
    assert counts is not None
    assert counts["num_equal"] > 10
    assert counts["num_different"] == 0


def test_a_branch_that_python_took_is_found_at_its_operator() -> None:
    """What the host remembers of the last values decides a number; the graph keeps the capture's."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.number = 1.0

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(double(x)) * self.number
            return y.tanh()

    model, x = Scaled().cuda().bfloat16(), torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)

    def follow(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    with torch.no_grad(), breakgraph.capture(follow, x, verify=True) as graph:
        model.number = 3.0
        report = graph.verify()
    assert report.steps[-1].verdict is Verdict.DIFFERENT
    assert report.culprit is not None
    assert report.culprit.segment == 1
    assert "has changed since" in report.culprit.hint


@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_memory_that_nobody_fills_is_nan_in_the_replay(backend: str) -> None:
    @breakgraph.eager_on_graph(mutates=("out",))
    def fill_live(x: Tensor, out: Tensor) -> None:
        out[:16] = x[:16]

    def forward(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fill_live(x.exp(), out)
        return out.sum()

    x = torch.randn(32, 64, device="cuda")
    with torch.no_grad(), pytest.raises(VerificationError) as caught:
        breakgraph.capture(forward, x, backend=backend, verify=True)
    report = caught.value.report
    assert isinstance(report, VerifyReport)
    assert report.steps[-1].verdict is Verdict.DIFFERENT
    assert report.steps[-1].differences[0].num_non_finite == 1


def test_random_numbers_are_the_same_in_every_arm() -> None:
    x = torch.randn(32, 64, device="cuda")
    with torch.no_grad(), breakgraph.capture(lambda x: double(torch.dropout(x, 0.5, True)), x, verify=True) as graph:
        assert [step.verdict for step in graph.verify().steps] == [Verdict.EQUAL] * 3
