"""Penalties and log probabilities against definitions written out token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch

from breakgraph.engine.sampler import History, Sampler, penalized, token_logprobs
from breakgraph.engine.sampling import SamplingParams

VOCAB = 30


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def random_history(seed: int) -> History:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    return History(prompt, [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 40))])


def row_penalized(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    out = logits.clone()
    for token in range(VOCAB):
        value = float(logits[token])
        count = list(history.output_token_ids).count(token)
        if count or token in history.prompt_token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * count
        if count:
            value -= params.presence_penalty
        out[token] = value
    return out


PARAMS = [
    SamplingParams(presence_penalty=1.5),
    SamplingParams(presence_penalty=-2.0),
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1),
]


def test_penalties_are_those_of_the_definition_in_any_mix_of_rows() -> None:
    params = PARAMS * 3
    logits = random_logits(len(params))
    histories = [random_history(seed) for seed in range(len(params))]
    expected = torch.stack([row_penalized(*row) for row in zip(logits, params, histories, strict=True)])
    torch.testing.assert_close(penalized(logits, params, histories), expected)


def test_an_answer_without_tokens_has_no_counts() -> None:
    logits, history = random_logits(1), History([3], [])
    params = [SamplingParams(presence_penalty=2, frequency_penalty=2)]
    assert torch.equal(penalized(logits, params, [history]), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_penalties_draw_the_same_beside_rows_with_them(temperature: float) -> None:
    logits = random_logits(4)
    plain = SamplingParams(temperature=temperature, seed=5)
    harsh = SamplingParams(temperature=0, frequency_penalty=2)
    sampler = Sampler(torch.device("cpu"), seed=0)
    alone = sampler.draw(logits[1:2], [plain], [sampler.make_generator(5)]).wait()
    best = int(logits[2].argmax())
    histories = [History([], []), History([], [1, 1, 1]), History([], [best] * 40), History([], [])]
    mixed = sampler.draw(
        logits, [plain, plain, harsh, plain], [sampler.make_generator(5) for _ in range(4)], histories
    ).wait()
    assert mixed[1] == alone[0]
    assert mixed[2] == int(row_penalized(logits[2], harsh, histories[2]).argmax()) != best


def test_penalties_leave_the_logits_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    histories = [random_history(0), random_history(1)]
    Sampler(torch.device("cpu"), seed=0).draw(logits, [PARAMS[-1]] * 2, [None] * 2, histories).wait()
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_definition() -> None:
    logits = random_logits(4)
    chosen, num_top = [3, 0, 29, 7], [0, 1, 5, 20]
    for row, found in enumerate(token_logprobs(logits, chosen, num_top)):
        values = logits[row].double().tolist()
        total = math.log(sum(math.exp(value) for value in values))
        ranked = sorted(range(VOCAB), key=lambda token: -values[token])[: num_top[row]]
        assert found.token_id == chosen[row]
        assert found.logprob == pytest.approx(values[chosen[row]] - total, abs=1e-5)
        assert found.top_token_ids == ranked
        assert found.top_logprobs == pytest.approx([values[token] - total for token in ranked], abs=1e-5)


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    (found,) = token_logprobs(torch.zeros(1, 3), [1], [20])
    assert sorted(found.top_token_ids) == [0, 1, 2]
