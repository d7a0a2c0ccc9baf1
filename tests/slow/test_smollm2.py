"""A real checkpoint: the captured engine gives transformers' own tokens, and replays give eager's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from breakgraph import LLM, SamplingParams
from breakgraph.runners import Runner, StepBatch
from slow.prompts import LENGTHS, prompts_of_lengths

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "max_model_len": max(LENGTHS) + MAX_TOKENS,
    "prefill_backend": "breakable",
    "decode_backend": "full",
    "prefill_buckets": (32, 128, 256),
    "decode_buckets": (1, 2, 4, 8),
    "use_tqdm": False,
}
BATCH_SIZES = (1, 8, 2, 4, 5)
"""Of the prompts in a shuffled order, so that long and short ones meet."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def llm(smollm2_folder: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_folder), dtype="float32", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM, tokenizer: Any) -> dict[int, list[int]]:
    """Of the captured engine, by prompt length; batches of one to eight."""
    prompts = prompts_of_lengths(tokenizer)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    found = {}
    for size in BATCH_SIZES:
        batch, order = [prompts[i] for i in order[:size]], order[size:]
        for output in llm.generate(batch, GREEDY, use_tqdm=False):
            found[len(output.prompt_token_ids)] = output.outputs[0].token_ids
    assert not order
    return found


@pytest.fixture(scope="module")
def hf_model(smollm2_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_those_of_transformers_generate(
    answers: dict[int, list[int]], hf_model: LlamaForCausalLM, tokenizer: Any, length: int
) -> None:
    prompt = prompts_of_lengths(tokenizer)[LENGTHS.index(length)]
    tokens = torch.tensor([prompt])
    expected = hf_model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=MAX_TOKENS, do_sample=False
    )
    assert answers[length] == expected[0, length:].tolist()


def test_all_of_it_was_replayed(llm: LLM, answers: dict[int, list[int]]) -> None:
    for phase, runner in llm.stats()["runners"].items():
        assert runner["num_eager_steps_by_reason"] == {}, phase
        assert sum(runner["num_replays_by_bucket"].values()) > 0, phase
    assert llm.stats()["runners"]["prefill"]["num_breaks"] == 30
    assert llm.stats()["runners"]["decode"]["num_breaks"] == 0


def test_chat_knows_the_capital_of_france_and_stops(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    completion = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].outputs[0]
    assert "Paris" in completion.text
    assert "<|im_end|>" not in completion.text
    assert completion.finish_reason == "stop"


def test_in_bfloat16_each_replay_has_the_bits_of_a_padded_eager_step(
    smollm2_folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of_lengths(tokenizer, (300, 7, 70, 1), seed=2)
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

    with LLM(str(smollm2_folder), dtype="bfloat16", **{**OPTIONS, "max_model_len": 320}) as llm:
        for phase, runner in llm.engine.runners.items():
            watch(phase, runner)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert all(not runner["num_eager_steps_by_reason"] for runner in llm.stats()["runners"].values())
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 4
    # 378 prompt tokens in steps of 256; the first step gives no token to the last prompts.
    assert compared["prefill"] >= 2
    assert compared["decode"] >= 7
