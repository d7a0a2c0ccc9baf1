"""The sampler against definitions written out one row at a time."""

from collections.abc import Sequence

import pytest
import torch

from breakgraph.engine.sampler import DrawnTokens, History, Sampler, filtered_probs
from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import BreakgraphError
from no_waiting import no_waiting

VOCAB = 50


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(torch.device("cpu"), seed=0)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(sampler: Sampler, logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
    generators = [None if p.seed is None else sampler.make_generator(p.seed) for p in params]
    return sampler.draw(logits, params, generators).wait()


def test_drawing_waits_for_nothing_and_gives_what_sampling_gives(device: torch.device) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=3, top_p=0.9, top_k=10, min_p=0.01),
        SamplingParams(),
        SamplingParams(seed=4, frequency_penalty=1.0, repetition_penalty=1.2),
    ]
    logits, histories = random_logits(4).to(device), [History([1, 2], [3])] * 4

    def drawn() -> DrawnTokens:
        sampler = Sampler(device, seed=0)
        generators = [None if p.seed is None else sampler.make_generator(p.seed) for p in params]
        with no_waiting(device):
            return sampler.draw(logits, params, generators, histories)

    tokens = drawn()
    assert tokens.token_ids_R.device.type == device.type
    assert tokens.token_ids_R.tolist() == tokens.wait() == drawn().wait()
    assert tokens.wait()[0] == logits[0].argmax().item()


def row_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The definition, token by token."""
    probs = (logits.double() / params.temperature).softmax(-1)
    keep = set(range(len(logits)))
    keep = {i for i in keep if probs[i] >= params.min_p * probs.max()}
    ranked = sorted(keep, key=lambda i: -probs[i].item())
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    total = sum(probs[i].item() for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= params.top_p and kept:
            break
        kept.append(i)
        mass += probs[i].item() / total
    out = torch.zeros(len(logits), dtype=torch.float64)
    out[kept] = probs[kept]
    return out / out.sum()


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=VOCAB + 10),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.8, top_k=10, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=-1, top_p=0.95),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_probabilities_are_those_of_the_definition(params: SamplingParams) -> None:
    logits = random_logits(3)
    expected = torch.stack([row_probs(row, params) for row in logits])
    torch.testing.assert_close(filtered_probs(logits, [params] * 3).double(), expected, atol=1e-6, rtol=1e-5)


def test_rows_with_different_params_do_not_touch_each_other() -> None:
    logits = random_logits(len(PARAMS))
    together = filtered_probs(logits, PARAMS)
    for i, params in enumerate(PARAMS):
        torch.testing.assert_close(together[i], filtered_probs(logits[i : i + 1], [params])[0], atol=1e-7, rtol=1e-6)


def test_greedy_is_the_argmax_in_float32(sampler: Sampler) -> None:
    logits = random_logits(4).bfloat16()
    assert draw(sampler, logits, [SamplingParams(temperature=0)] * 4) == logits.float().argmax(-1).tolist()


def test_greedy_rows_stay_greedy_beside_random_ones(sampler: Sampler) -> None:
    logits = random_logits(6)
    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=50.0)
    drawn = draw(sampler, logits, [greedy, hot, greedy, hot, hot, greedy])
    assert [drawn[i] for i in (0, 2, 5)] == logits.argmax(-1)[[0, 2, 5]].tolist()


def test_logits_are_left_as_they_were(sampler: Sampler) -> None:
    logits = random_logits(3)
    before = logits.clone()
    draw(sampler, logits, [SamplingParams(top_k=3, min_p=0.1, top_p=0.5)] * 3)
    assert torch.equal(logits, before)


def test_a_seed_gives_the_same_tokens_whatever_the_batch(sampler: Sampler) -> None:
    logits = random_logits(1)
    seeded = SamplingParams(seed=7, temperature=2.0)
    generator = sampler.make_generator(7)
    alone = [sampler.draw(logits, [seeded], [generator]).wait()[0] for _ in range(20)]

    other = Sampler(torch.device("cpu"), seed=99)
    generator = other.make_generator(7)
    crowded = []
    for step in range(20):
        rows = torch.cat([random_logits(2, seed=step), logits, random_logits(1, seed=step)])
        params = [SamplingParams(), SamplingParams(temperature=0), seeded, SamplingParams(seed=3, top_k=4)]
        crowded.append(other.draw(rows, params, [None, None, generator, other.make_generator(3)]).wait()[2])
    assert crowded == alone
    assert len(set(alone)) > 3


def test_unseeded_rows_follow_the_engines_seed() -> None:
    logits, params = random_logits(4), [SamplingParams(temperature=3.0)] * 4
    first = [draw(Sampler(torch.device("cpu"), seed=1), logits, params) for _ in range(2)]
    other = draw(Sampler(torch.device("cpu"), seed=2), logits, params)
    assert first[0] == first[1] != other


def test_draws_follow_the_probabilities(sampler: Sampler) -> None:
    rows = 20_000
    params = SamplingParams(top_k=4)
    logits = random_logits(1).expand(rows, VOCAB)
    drawn = torch.tensor(draw(sampler, logits, [params] * rows))
    shares = torch.bincount(drawn, minlength=VOCAB).double() / rows
    torch.testing.assert_close(shares, row_probs(logits[0], params), atol=0.015, rtol=0)


def test_masked_tokens_are_never_drawn(sampler: Sampler) -> None:
    logits = torch.full((200, VOCAB), -torch.inf)
    logits[:, [3, 8]] = 0.0
    assert set(draw(sampler, logits, [SamplingParams(temperature=5.0)] * 200)) == {3, 8}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_raise_and_name_the_row(sampler: Sampler, bad: float, temperature: float) -> None:
    logits = random_logits(3)
    logits[1, 4] = bad
    with pytest.raises(BreakgraphError, match="batch row 1"):
        draw(sampler, logits, [SamplingParams(temperature=temperature)] * 3)


def test_a_row_without_any_allowed_token_raises(sampler: Sampler) -> None:
    with pytest.raises(BreakgraphError, match="batch row 0"):
        draw(sampler, torch.full((1, VOCAB), -torch.inf), [SamplingParams()])
