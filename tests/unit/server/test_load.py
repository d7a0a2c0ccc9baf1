"""Many clients at once, some of whom leave or send nonsense: the answers are those of one client alone."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from breakgraph import LLM, SamplingParams
from breakgraph.engine.engine_thread import TokenEvent
from breakgraph.engine.request import Request
from breakgraph.server.generation import Generation
from unit.server.conftest import MODEL, SIZES, RunningServer, running
from unit.server.gate import wait_until

NUM_CLIENTS = 64
NUM_REQUESTS = 504
NUM_ROUNDS = 3
LEAVE, MALFORMED = 0.10, 0.05
MAX_TOKENS = 6


def make_prompts() -> list[str]:
    """Short and long ones, half of them with a beginning that others have too."""
    rng = random.Random(0)
    shared = "a beginning that several prompts share, of two blocks; "
    return [(shared if i % 2 else "") + "".join(rng.choices("abcdefgh ", k=rng.randint(1, 40))) for i in range(24)]


@pytest.fixture(scope="module")
def answers(llama_folder: Path) -> dict[str, str]:
    """One prompt at a time, eagerly, without reuse."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    options = SIZES | {"prefill_backend": "eager", "decode_backend": "eager", "enable_prefix_caching": False}
    with LLM(str(llama_folder), **options) as llm:
        return {prompt: llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text for prompt in make_prompts()}


@pytest.fixture(scope="module")
def small_server(llama_folder: Path) -> Iterator[RunningServer]:
    """With so few blocks that requests preempt each other."""
    with LLM(str(llama_folder), **SIZES | {"num_gpu_blocks_override": 14}) as llm, running(llm) as server:
        yield server


@dataclass
class Tally:
    answered: int = 0
    left: int = 0
    refused: int = 0


async def one_client(http: httpx.AsyncClient, rng: random.Random, answers: dict[str, str], tally: Tally) -> None:
    prompt = rng.choice(list(answers))
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    kind = rng.random()
    if kind < MALFORMED:
        change = rng.choice([{"max_tokens": -1}, {"prompt": 5}, {"surprise": 1}, {"prompt": "x" * 500}])
        response = await http.post("/v1/completions", json=body | change)
        assert response.status_code == 400, response.text
        tally.refused += 1
        return
    leaves = kind < MALFORMED + LEAVE
    text, is_done = "", False
    async with http.stream("POST", "/v1/completions", json=body | ({"max_tokens": 30} if leaves else {})) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if leaves:
                    break
            is_done |= line == "data: [DONE]"
    if leaves:
        tally.left += 1
        return
    assert is_done
    assert text == answers[prompt]
    tally.answered += 1


async def one_round(url: str, answers: dict[str, str], seed: int) -> Tally:
    tally, turns = Tally(), asyncio.Semaphore(NUM_CLIENTS)
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as http:

        async def take_turn(index: int) -> None:
            async with turns:
                await one_client(http, random.Random(f"{seed} {index}"), answers, tally)

        await asyncio.gather(*map(take_turn, range(NUM_REQUESTS // NUM_ROUNDS)))
    return tally


def num_left() -> Counter[str]:
    """Objects of requests that somebody still holds."""
    gc.collect()
    kinds = {Request, Generation, TokenEvent}
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds)


def test_every_answer_is_that_of_a_client_alone(small_server: RunningServer, answers: dict[str, str]) -> None:
    before = num_left()
    total = Tally()
    for seed in range(NUM_ROUNDS):
        tally = asyncio.run(one_round(small_server.url, answers, seed))
        total.answered += tally.answered
        total.left += tally.left
        total.refused += tally.refused
        wait_until(lambda: small_server.service.engine._thread.num_live == 0)
        wait_until(lambda: not small_server.service.engine._queues)
        small_server.assert_idle()
        wait_until(lambda: num_left() == before)
    assert total.answered + total.left + total.refused == NUM_REQUESTS
    assert min(total.left, total.refused) > 10
    stats = small_server.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_prefix_cached_tokens"] > 0
