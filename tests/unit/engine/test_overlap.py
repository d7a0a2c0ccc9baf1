"""What is done while the device runs a step: news of the last one goes out, and the next one is prepared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from breakgraph import LLM, SamplingParams
from breakgraph.engine.engine_thread import EngineThread, TokenEvent
from breakgraph.engine.request import Request
from breakgraph.engine.scheduler import ScheduledRow, ScheduledStep
from breakgraph.engine.step_batch import PreparedDecode, build_batch
from breakgraph.runners import StepBatch
from unit.engine.small import SMALL, Reference, launch_none_ahead

PROMPTS = [[1, 2, 3], [4] * 30, [5, 6], [7] * 15, [8] * 16, [9]]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def same(one: StepBatch, other: StepBatch) -> bool:
    fields = [field.name for field in dataclasses.fields(StepBatch) if field.name != "block_tables"]
    tables = zip(one.block_tables, other.block_tables, strict=True)
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields) and all(
        np.array_equal(*pair) for pair in tables
    )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that had a prepared one before it: whether that was used; if so it was what it should be.

    No step is launched ahead."""
    launch_none_ahead(monkeypatch)
    used: list[bool] = []
    prepared_batch = PreparedDecode.batch

    def compared(self: PreparedDecode, step: ScheduledStep) -> StepBatch | None:
        batch = prepared_batch(self, step)
        if batch is not None:
            assert same(batch, build_batch(step, 16))
        used.append(batch is not None)
        return batch

    monkeypatch.setattr(PreparedDecode, "batch", compared)
    return used


def test_a_prepared_step_is_the_one_that_would_be_built(idle: LLM, reference: Reference, watched: list[bool]) -> None:
    lengths = [40, 3, 21, 8, 17, 40]
    outputs = idle.generate(PROMPTS, [greedy(length) for length in lengths], use_tqdm=False)
    for output, prompt, length in zip(outputs, PROMPTS, lengths, strict=True):
        assert output.outputs[0].token_ids == reference(prompt, length)
    # Answers end at different steps, and cross blocks; only steps with parts of prompts are built afresh.
    assert watched[-36:] == [True] * 36


def test_preemptions_and_arrivals_are_noticed(
    llama_folder: Any, reference: Reference, watched: list[bool], device: Any
) -> None:
    few = {**SMALL, "num_gpu_blocks_override": 12}
    prompts = [[start] * 40 for start in range(6)]
    with LLM(str(llama_folder), device=str(device), **few) as llm:
        outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
        assert llm.stats()["num_preemptions"] > 0
    assert [output.outputs[0].token_ids for output in outputs] == [reference(prompt, 40) for prompt in prompts]
    assert {True, False} <= set(watched)


def test_a_request_that_lost_its_blocks_and_has_others_is_noticed() -> None:
    request = Request(
        request_id="r", prompt=None, prompt_token_ids=[1] * 4, params=SamplingParams(), max_total_tokens=50
    )
    request.block_ids, request.num_computed_tokens = [3, 4], 3
    scheduled = ScheduledStep((ScheduledRow(request, 1),), is_decode=True)
    prepared = PreparedDecode.after(scheduled, 4)
    request.output_token_ids.append(9)
    request.num_computed_tokens = 4
    batch = prepared.batch(scheduled)
    assert batch is not None
    assert same(batch, build_batch(scheduled, 4))
    request.block_ids = [5, 6]
    assert prepared.batch(scheduled) is None


class Watch:
    """What happens in an engine's thread whose device is taken to work beside it, in order."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.events: list[TokenEvent] = []
        self.thread = EngineThread(llm.engine, self._publish, max_waiting=4)
        self.thread._has_own_device = True
        for runner in llm.engine.runners.values():
            monkeypatch.setattr(runner, "run", self._logged(runner.run))

    def _logged(self, run: Callable[[StepBatch], Any]) -> Callable[[StepBatch], Any]:
        def logged(batch: StepBatch) -> Any:
            self.log.append("run")
            return run(batch)

        return logged

    def _publish(self, events: list[TokenEvent]) -> None:
        self.log.append(" ".join("error" if event.error else str(event.token_id) for event in events))
        self.events += events

    def run(self, *requests: Request) -> None:
        """Until nothing is left."""
        self.thread.add(requests)
        self.thread.start()
        while self.thread.num_live:
            self.thread.call(lambda engine: None).result()
        self.thread.close()


def make(llm: LLM, prompt: list[int], max_tokens: int) -> Request:
    return llm.engine.make_request(prompt, greedy(max_tokens), with_text=False)


def test_tokens_go_out_when_the_device_has_the_step_after_the_next(
    idle: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(idle, monkeypatch)
    watch.run(make(idle, [1, 2, 3], 4))
    first, second, third, last = map(str, reference([1, 2, 3], 4))
    assert watch.log == ["run", "run", "run", first, "run", second, third, last]


def test_tokens_go_out_when_the_device_has_the_next_step_if_none_is_launched_ahead(
    idle: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_none_ahead(monkeypatch)
    watch = Watch(idle, monkeypatch)
    watch.run(make(idle, [1, 2, 3], 4))
    first, second, third, last = map(str, reference([1, 2, 3], 4))
    assert watch.log == ["run", "run", first, "run", second, "run", third, last]


def test_answers_are_the_same_and_complete(idle: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(idle, monkeypatch)
    requests = [make(idle, prompt, length) for prompt, length in zip(PROMPTS, (9, 1, 5, 12, 2, 7), strict=True)]
    watch.run(*requests)
    for request in requests:
        mine = [event for event in watch.events if event.request is request]
        assert [event.token_id for event in mine] == reference(request.prompt_token_ids, len(mine))
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + ["length"]


def test_no_news_of_a_request_that_was_aborted_and_those_of_others_are_not_lost(
    idle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that ends one of them is over, and nothing of it was sent."""
    watch = Watch(idle, monkeypatch)
    ends, aborted = make(idle, [3], 1), make(idle, [1], 50)
    step = idle.engine.step

    def aborting(meanwhile: Callable[[], None]) -> list[Request]:
        finished = step(meanwhile)
        watch.thread.abort([aborted.request_id])
        return finished

    monkeypatch.setattr(idle.engine, "step", aborting)
    watch.run(ends, aborted)
    assert [(event.request, event.finish_reason) for event in watch.events] == [(ends, "length")]


def test_news_go_out_before_the_failure_of_the_next_step(
    idle: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(idle, monkeypatch)
    runner = idle.engine.runners["decode"]
    monkeypatch.setattr(runner, "run", lambda batch: 1 // 0)
    watch.run(make(idle, [1, 2, 3], 4))
    assert watch.log == ["run", str(reference([1, 2, 3], 1)[0]), "error"]
