"""Several answers to a prompt, log probabilities and penalties, through the whole engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from breakgraph import LLM, SamplingParams
from breakgraph.engine.outputs import RequestOutput
from breakgraph.engine.sampler import DrawnTokens, Sampler
from unit.engine.small import Reference

PROMPTS = ["once upon a time", "x"]


def answer(llm: LLM, prompts: Any, **params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}), use_tqdm=False)


def test_n_answers_come_in_one_output_with_their_numbers(idle: LLM) -> None:
    outputs = answer(idle, PROMPTS, n=3, temperature=2.0, seed=1)
    assert [[completion.index for completion in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    for output in outputs:
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_the_seed_of_each_answer_is_one_more(idle: LLM) -> None:
    (both,) = answer(idle, PROMPTS[0], n=2, temperature=2.0, seed=7)
    singles = [answer(idle, PROMPTS[0], temperature=2.0, seed=seed)[0].outputs[0].token_ids for seed in (7, 8)]
    assert [completion.token_ids for completion in both.outputs] == singles


def test_the_largest_seed_goes_on_at_the_smallest(idle: LLM) -> None:
    (both,) = answer(idle, "x", n=2, temperature=2.0, seed=2**63 - 1)
    (single,) = answer(idle, "x", temperature=2.0, seed=-(2**63))
    assert both.outputs[1].token_ids == single.outputs[0].token_ids


def test_logprobs_are_of_the_models_own_distribution(idle: LLM, reference: Reference) -> None:
    (plain,) = answer(idle, PROMPTS[0])
    (output,) = answer(idle, PROMPTS[0], logprobs=3, repetition_penalty=1.0)
    completion = output.outputs[0]
    assert plain.outputs[0].logprobs is None
    assert completion.token_ids == plain.outputs[0].token_ids
    assert completion.logprobs is not None
    assert [token.token_id for token in completion.logprobs] == completion.token_ids
    for token in completion.logprobs:
        # greedy: the chosen token is the likeliest
        assert (token.top_token_ids[0], token.top_logprobs[0]) == (token.token_id, token.logprob)
        assert token.top_logprobs == sorted(token.top_logprobs, reverse=True)
        assert len(token.top_logprobs) == 3


def test_temperature_and_penalties_do_not_change_logprobs(idle: LLM) -> None:
    first = [
        answer(idle, "x", max_tokens=1, logprobs=5, **params)[0].outputs[0].logprobs
        for params in ({}, {"temperature": 2.0, "seed": 1}, {"repetition_penalty": 50.0})
    ]
    tops = [tokens[0].top_token_ids for tokens in first if tokens]
    assert tops == [tops[0]] * 3


def test_only_requests_that_ask_for_logprobs_get_them(idle: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=5, logprobs=count) for count in (None, 0, 2)]
    outputs = idle.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    found = [output.outputs[0].logprobs for output in outputs]
    assert found[0] is None
    assert [len(tokens) for tokens in found[1:] if tokens] == [5, 5]
    assert [[len(token.top_token_ids) for token in tokens] for tokens in found[1:] if tokens] == [[0] * 5, [2] * 5]


def test_a_strong_presence_penalty_forbids_repetition(idle: LLM) -> None:
    (free,) = answer(idle, PROMPTS[0], max_tokens=40)
    (bound,) = answer(
        idle, PROMPTS[0], max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=9.0
    )
    assert len(set(free.outputs[0].token_ids)) < len(set(bound.outputs[0].token_ids))


def test_penalties_are_transformers_own(idle: LLM, llama_folder: Any) -> None:
    from transformers import AutoModelForCausalLM

    prompt = [5, 6, 7, 5, 6, 7]
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.tensor([prompt])
    expected = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, repetition_penalty=1.5
    )
    found = answer(idle, [prompt], max_tokens=20, repetition_penalty=1.5)[0].outputs[0].token_ids
    assert found == expected[0, len(prompt) :].tolist()
    assert found != answer(idle, [prompt], max_tokens=20)[0].outputs[0].token_ids


def test_nothing_is_computed_for_requests_that_ask_for_nothing(idle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    histories: list[Any] = []
    draw = Sampler.draw

    def watched(self: Sampler, *args: Any) -> DrawnTokens:
        histories.append(args[3])
        return draw(self, *args)

    monkeypatch.setattr(Sampler, "draw", watched)
    monkeypatch.delattr("breakgraph.engine.engine.token_logprobs")
    monkeypatch.delattr("breakgraph.engine.sampler.penalized")
    answer(idle, PROMPTS)
    assert histories
    assert not any(histories)
