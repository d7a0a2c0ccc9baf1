"""A real checkpoint: the captured engine gives transformers' own tokens, and replays give eager's bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from breakgraph import LLM, SamplingParams
from breakgraph.cli.main import main
from breakgraph.runners import Runner, StepBatch
from slow.prompts import prompts_of_lengths

# The first test of a fresh machine also fetches and converts the model.
pytestmark = pytest.mark.timeout(1200)

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "prefill_backend": "breakable",
    "decode_backend": "full",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "prefill_buckets": (64, 256),
    "decode_buckets": (1, 4, 8),
    "use_tqdm": False,
}
LONG = 512
"""Longer prompts have an engine of their own: a captured decode row costs as much as its longest context."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


def captured_answers(
    folder: Path, prompts: Sequence[list[int]], batch_sizes: Sequence[int], **options: Any
) -> dict[int, list[int]]:
    """By prompt length; in batches of these sizes, after a shuffle, so that long and short prompts meet."""
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    max_model_len = max(map(len, prompts)) + MAX_TOKENS
    found = {}
    with LLM(str(folder), dtype="float32", **{**OPTIONS, "max_model_len": max_model_len, **options}) as llm:
        for size in batch_sizes:
            batch, order = [prompts[i] for i in order[:size]], order[size:]
            for output in llm.generate(batch, GREEDY, use_tqdm=False):
                found[len(output.prompt_token_ids)] = output.outputs[0].token_ids
        runners = llm.stats()["runners"]
    assert not order
    assert {phase: runner["num_breaks"] for phase, runner in runners.items()} == {"prefill": 30, "decode": 0}
    assert [runner["num_eager_steps_by_reason"] for runner in runners.values()] == [{}, {}]
    return found


# One test, so that the captures are made once however the tests are spread over workers.
def test_greedy_tokens_are_those_of_transformers_generate(smollm2_folder: Path, tokenizer: Any) -> None:
    prompts = prompts_of_lengths(tokenizer)
    short = [prompt for prompt in prompts if len(prompt) <= LONG]
    long = [prompt for prompt in prompts if len(prompt) > LONG]
    found = captured_answers(smollm2_folder, short, (1, 8, 2, 4, 3))
    found |= captured_answers(smollm2_folder, long, (2,), prefill_buckets=(256,), decode_buckets=(2,), max_num_seqs=2)

    model = LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    expected = {}
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        generated = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        expected[len(prompt)] = generated[0, len(prompt) :].tolist()
    assert found == expected


def test_in_bfloat16_each_replay_has_the_bits_of_a_padded_eager_step(
    smollm2_folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of_lengths(tokenizer, (70, 7, 20, 1), seed=2)
    compared = {"prefill": 0, "decode": 0}

    def watch(phase: str, runner: Runner) -> None:
        run: Callable[[StepBatch], torch.Tensor] = runner.run

        def run_both(batch: StepBatch) -> torch.Tensor:
            expected = runner.run_padded_eager(batch)
            logits = run(batch)
            assert logits.dtype == torch.bfloat16
            assert torch.equal(logits, expected), f"{phase}, step {compared[phase]}, q_lens {batch.q_lens}"
            compared[phase] += 1
            return logits

        monkeypatch.setattr(runner, "run", run_both)

    # Steps of 32 tokens: products of two bfloat16 matrices are slow on most CPUs.
    sizes = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    ladders = {"prefill_buckets": (8, 32), "decode_buckets": (4,)}
    with LLM(str(smollm2_folder), dtype="bfloat16", **{**OPTIONS, **sizes, **ladders}) as llm:
        for phase, runner in llm.engine.runners.items():
            watch(phase, runner)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert all(not runner["num_eager_steps_by_reason"] for runner in llm.stats()["runners"].values())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 4
    # 98 prompt tokens: three steps of 32; in the next one each of the four requests has one token.
    assert compared == {"prefill": 3, "decode": 8}


def test_the_command_line_chats_with_the_default_model(
    smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--json --temperature 0 --max-tokens 40 --dtype float32 --device cpu --max-model-len 128 "
        "--max-num-batched-tokens 64 --max-num-seqs 1 --prefill-buckets 64"
    )
    chat = ["--chat", "What is the capital of France?", "--cache-dir", str(smollm2_folder.parent)]
    assert main(["generate", *chat, *flags.split()]) == 0
    printed = json.loads(capsys.readouterr().out)
    completion = printed["outputs"][0]["outputs"][0]
    assert "Paris" in completion["text"]
    assert "<|im_end|>" not in completion["text"]
    assert completion["finish_reason"] == "stop"
    assert printed["stats"]["model"] == "smollm2"
