"""Log probabilities of the prompt's own tokens against those of transformers, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from breakgraph import LLM, SamplingParams
from breakgraph.engine.outputs import RequestOutput
from breakgraph.engine.sampler import token_logprobs
from unit.engine.small import SMALL

PROMPTS = [[7], [3, 9], [5, 6, 7, 5, 6, 7, 8, 1, 2], [*range(40, 88)]]
PLAIN = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
WITH = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=3)


def check(folder: Path, output: RequestOutput) -> None:
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    if len(prompt) == 1:
        return
    for token, expected in zip(found[1:], token_logprobs(logits, prompt[1:], [3] * (len(prompt) - 1)), strict=True):
        assert token is not None
        assert (token.token_id, token.top_token_ids) == (expected.token_id, expected.top_token_ids)
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert token.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)


def test_they_are_those_of_transformers_beside_others(idle: LLM, llama_folder: Path) -> None:
    plain = idle.generate(PROMPTS, PLAIN, use_tqdm=False)
    # All prompts are in the prefix cache now, which must not hide a token.
    found = idle.generate([*PROMPTS, *PROMPTS], [*[WITH] * 4, *[PLAIN] * 4], use_tqdm=False)
    for output in found[:4]:
        check(llama_folder, output)
    assert [output.prompt_logprobs for output in found[4:]] == [None] * 4
    tokens = [output.outputs[0].token_ids for output in plain]
    assert [output.outputs[0].token_ids for output in found] == tokens * 2


def test_each_is_kept_once_when_requests_are_preempted(llama_folder: Path, device: torch.device) -> None:
    prompts = [[*range(start, start + 40)] for start in range(0, 48, 8)]
    for caching in (False, True):
        few = {**SMALL, "num_gpu_blocks_override": 12, "enable_prefix_caching": caching}
        with LLM(str(llama_folder), device=str(device), **few) as llm:
            outputs = llm.generate(prompts, WITH, use_tqdm=False)
            assert llm.stats()["num_preemptions"] > 0
        for output in outputs:
            check(llama_folder, output)


def test_only_the_first_of_n_answers_computes_them(idle: LLM, llama_folder: Path) -> None:
    engine = idle.engine
    for index in range(2):
        request = engine.make_request(PROMPTS[2], WITH, index=index)
        assert request.wants_prompt_logprobs == (index == 0)
    (output,) = idle.generate(PROMPTS[2:3], dataclasses.replace(WITH, n=3), use_tqdm=False)
    check(llama_folder, output)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 1


def test_a_step_computes_one_token_of_them(idle: LLM) -> None:
    engine = idle.engine
    engine.add(engine.make_request(PROMPTS[3], WITH))
    sizes = []
    while engine.has_requests:
        step = engine.scheduler.schedule()
        assert step is not None
        sizes.append([row.num_new_tokens for row in step.rows])
        engine.step()
    assert sizes == [[1]] * (48 + 5)
