"""What an event loop gets of a generation when it was away for a while."""

from __future__ import annotations

import asyncio

import pytest

from breakgraph import LLM, SamplingParams
from breakgraph.engine.prompts import TokenPrompt
from breakgraph.server.async_engine import AsyncEngine
from breakgraph.server.deadline import Deadline
from breakgraph.server.generation import Delta, Generation
from breakgraph.server.metrics import Metrics
from unit.server.gate import wait_until

PARAMS = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
PROMPT = [4, 5, 6]


def collected(llm: LLM, *, is_away: bool) -> list[Delta]:
    async def collect() -> list[Delta]:
        engine = AsyncEngine(llm.engine, max_waiting=8, metrics=Metrics(llm.engine))
        await engine.start()
        try:
            prompts = [TokenPrompt(PROMPT)]
            generation = Generation(engine, prompts, PARAMS, num_answers=3, stop_strings=(), deadline=Deadline(600))
            async with generation:
                if is_away:
                    wait_until(lambda: engine._thread.num_live == 0)  # nothing else runs in this loop meanwhile
                return [delta async for delta in generation]
        finally:
            engine.close()

    return asyncio.run(collect())


def test_what_has_gathered_is_one_part_an_answer(llm: LLM) -> None:
    (expected,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    deltas = collected(llm, is_away=True)
    assert [delta.index for delta in deltas] == [0, 1, 2]
    for delta in deltas:
        assert delta.text == expected.outputs[0].text
        assert [token.token_id for token in delta.tokens] == expected.outputs[0].token_ids
        assert delta.finish_reason == "length"


def test_parts_add_up_to_the_same(llm: LLM) -> None:
    whole = [Delta(index, "", [], None) for index in range(3)]
    for delta in collected(llm, is_away=False):
        whole[delta.index].append(delta)
    assert whole == collected(llm, is_away=True)


def test_tokens_before_a_failure_are_given_out_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = llm.engine.step, 0

    def failing(meanwhile: object) -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 5:
            raise RuntimeError("no more")
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    seen: list[Delta] = []

    async def collect() -> None:
        engine = AsyncEngine(llm.engine, max_waiting=8, metrics=Metrics(llm.engine))
        await engine.start()
        try:
            async with Generation(
                engine, [TokenPrompt(PROMPT)], PARAMS, num_answers=1, stop_strings=(), deadline=Deadline(600)
            ) as generation:
                wait_until(lambda: engine._thread.num_live == 0)
                async for delta in generation:
                    seen.append(delta)
        finally:
            engine.close()

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(collect())
    assert [len(delta.tokens) for delta in seen] == [5]
