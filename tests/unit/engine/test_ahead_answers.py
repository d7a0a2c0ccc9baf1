"""Answers are the same, token by token, as without steps that are launched ahead, whatever comes, goes and fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph import LLM, SamplingParams
from breakgraph.engine.request import Request
from breakgraph.runners import StepBatch
from unit.engine.small import SMALL, Reference, launch_none_ahead
from unit.engine.symbolic_engine import InjectedError, SymbolicEngine, add, answer_of, greedy, run_to_end
from unit.engine.symbolic_kv import SIZES, check_books

# At most 20 tokens of prompt and 12 of answer: 8 blocks, so every one fits alone.
PROMPTS = st.lists(st.sampled_from([[1] * 4, [2] * 4, [1, 2], [3]]), min_size=1, max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0, 1.0]),
    max_tokens=st.integers(1, 12),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([None, None, [4, 5]]),
    ignore_eos=st.sampled_from([True, True, False]),
    presence_penalty=st.sampled_from([0, 0, 0, 1.0]),
    logprobs=st.sampled_from([None] * 9 + [0]),
)
REQUESTS = st.lists(st.tuples(PROMPTS, PARAMS), min_size=1, max_size=10)
EVENTS = st.lists(st.sampled_from(["arrive", *["step"] * 4, "fail", "abort", "reset"]), max_size=60)


class Books:
    """What happened to an engine; checks after each event that nobody has more than was said to them."""

    def __init__(self, engine: SymbolicEngine, wanted: list[tuple[list[int], SamplingParams]]) -> None:
        self.engine = engine
        self.requests = [engine.make_request(prompt, params) for prompt, params in wanted]
        self.arriving = list(reversed(self.requests))
        self.aborted: list[Request] = []

    def event(self, name: str) -> None:
        engine = self.engine
        if name == "arrive" and self.arriving:
            engine.add(self.arriving.pop())
        elif name == "step" and engine.has_requests:
            try:
                engine.step()
            except InjectedError:
                assert all(len(r.output_token_ids) == self.sizes[r] for r in self.requests), "a failed step was booked"
        elif name == "fail":
            engine.fakes[len(self.arriving) % 2].fails_at = 1
        elif name == "abort" and engine.scheduler.running:
            self.aborted.append(engine.scheduler.running[-1])
            engine.abort([self.aborted[-1].request_id])
        elif name == "reset":
            engine.reset_prefix_cache()
        self.sizes = {request: len(request.output_token_ids) for request in self.requests}
        check_books(engine.scheduler)

    def check_end(self) -> None:
        for request in self.requests:
            expected = answer_of(request)
            size = len(request.output_token_ids) if request in self.aborted else len(expected)
            assert request.output_token_ids == expected[:size]
        allocator = self.engine.scheduler.allocator
        assert allocator.num_free == allocator.num_usable
        assert self.engine.ahead._launched is None


@settings(max_examples=150, deadline=None)
@given(wanted=REQUESTS, events=EVENTS, sizes=SIZES)
def test_whatever_happens_answers_are_right_and_no_block_is_lost(
    wanted: list[tuple[list[int], SamplingParams]], events: list[str], sizes: dict[str, int]
) -> None:
    engine = SymbolicEngine(**sizes)
    books = Books(engine, wanted)
    for name in [*events, *["arrive"] * len(wanted)]:
        books.event(name)
    while engine.has_requests:
        books.event("step")
    books.check_end()


@settings(max_examples=50, deadline=None)
@given(wanted=REQUESTS, events=st.lists(st.sampled_from(["arrive", "step", "step"]), max_size=40))
def test_every_step_and_every_row_is_counted(wanted: list[tuple[list[int], SamplingParams]], events: list[str]) -> None:
    engine = SymbolicEngine(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64)
    booked, num_steps = 0, 0
    commit = engine.scheduler.commit

    def counted(step: Any, *rest: Any) -> list[Request]:
        nonlocal booked, num_steps
        booked, num_steps = booked + len(step.rows), num_steps + 1
        return commit(step, *rest)

    engine.scheduler.commit = counted  # type: ignore[method-assign]
    books = Books(engine, wanted)
    for name in [*events, *["arrive"] * len(wanted)]:
        books.event(name)
    run_to_end(engine)
    num_launched, num_void_rows, reasons = engine.counts
    assert num_launched + sum(reasons.values()) == num_steps
    assert sum(fake.num_rows for fake in engine.fakes) == booked + num_void_rows
    books.check_end()


class TestOfAModel:
    """On captured graphs and a real forward."""

    @pytest.fixture
    def idle_counts(self, idle: LLM) -> Iterator[Callable[[], tuple[int, int]]]:
        before = idle.stats()["steps_ahead"]

        def since() -> tuple[int, int]:
            now = idle.stats()["steps_ahead"]
            return now["num_launched"] - before["num_launched"], now["num_void_rows"] - before["num_void_rows"]

        yield since
        assert idle.engine.ahead._launched is None

    @pytest.fixture(autouse=True)
    def _late_device(self, idle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the device works beside the host it begins each step late: what the host does too early shows."""
        if torch.device(idle.config.device).type != "cuda":
            return
        for runner in idle.engine.runners.values():

            def run(batch: StepBatch, run: Callable[[StepBatch], torch.Tensor] = runner.run) -> torch.Tensor:
                torch.cuda._sleep(5_000_000)
                return run(batch)

            monkeypatch.setattr(runner, "run", run)

    def test_greedy_answers_with_early_ends(
        self, idle: LLM, reference: Reference, idle_counts: Callable[[], tuple[int, int]]
    ) -> None:
        prompts = [[(5 * n + i * i) % 96 for i in range(1 + 4 * n)] for n in range(7)]
        whole = [reference(prompt, 30) for prompt in prompts]
        # One that the answer has as late as it can, which is early in some.
        stops = [max(answer, key=answer.index) for answer in whole]
        expected = [answer[: answer.index(stop) + 1] for answer, stop in zip(whole, stops, strict=True)]
        assert len({len(answer) for answer in expected}) > 2
        params = [SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop]) for stop in stops]
        outputs = idle.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        num_launched, num_void_rows = idle_counts()
        assert num_launched > 5
        assert num_void_rows > 2

    def test_drawn_answers_are_the_same_as_without(
        self, idle: LLM, monkeypatch: pytest.MonkeyPatch, idle_counts: Callable[[], tuple[int, int]]
    ) -> None:
        prompts = [[n] * n for n in range(1, 8)]
        params = [
            SamplingParams(max_tokens=20 + n, seed=n if n % 2 else None, top_k=20 * (n % 3), top_p=0.9)
            for n in range(7)
        ]

        def answers() -> list[list[int]]:
            idle.reset_prefix_cache()
            idle.engine.sampler._shared.manual_seed(1)
            return [output.outputs[0].token_ids for output in idle.generate(prompts, params, use_tqdm=False)]

        ahead, (num_launched, _) = answers(), idle_counts()
        launch_none_ahead(monkeypatch)
        assert ahead == answers()
        assert num_launched > 15
        assert idle_counts()[0] == num_launched

    @pytest.mark.parametrize("options", [{"decode_backend": "eager"}, {"decode_backend": "breakable"}])
    def test_eager_steps_and_steps_with_breaks(
        self, llama_folder: Path, device: torch.device, reference: Reference, options: dict[str, str]
    ) -> None:
        prompts = [[3, 1, 4], [1, 5] * 12, [9]]
        with LLM(str(llama_folder), device=str(device), **SMALL, **options) as llm:
            outputs = llm.generate(prompts, [greedy(n) for n in (12, 20, 3)], use_tqdm=False)
            assert llm.stats()["steps_ahead"]["num_launched"] > 15
        answers = [reference(prompt, n) for prompt, n in zip(prompts, (12, 20, 3), strict=True)]
        assert [output.outputs[0].token_ids for output in outputs] == answers

    def test_it_is_closed_with_a_step_on_the_device(self, llama_folder: Path, device: torch.device) -> None:
        with LLM(str(llama_folder), device=str(device), **SMALL) as llm:
            add(llm.engine, [1, 2, 3], greedy(50))
            llm.engine.step()
            assert llm.engine.ahead._launched is not None
        assert llm.engine.ahead._launched is None
        assert llm.engine.family.pool_bytes == 0

    def test_steps_that_are_compared_with_eager_come_one_after_the_other(
        self, llama_folder: Path, device: torch.device, reference: Reference
    ) -> None:
        with LLM(str(llama_folder), device=str(device), **SMALL, verify="sample:0.5") as llm:
            outputs = llm.generate([[1, 2, 3]], greedy(8), use_tqdm=False)
            counts = llm.stats()["steps_ahead"]
        assert outputs[0].outputs[0].token_ids == reference([1, 2, 3], 8)
        assert counts == {"num_launched": 0, "num_void_rows": 0, "num_not_launched_by_reason": {"live_check": 8}}

    def test_verify_and_reports_after_a_step_that_nobody_needs(self, idle: LLM) -> None:
        request = add(idle.engine, [1, 2, 3], greedy(50))
        idle.engine.step()
        idle.engine.abort([request.request_id])
        assert idle.verify().ok
        assert idle.memory_report().buckets
