"""Steps that are launched before the tokens of the step before them are known: answers, books and counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph import LLM, SamplingParams
from breakgraph.engine.engine import Engine
from breakgraph.engine.request import Request
from breakgraph.errors import BreakgraphError
from unit.engine.small import Reference, launch_none_ahead
from unit.engine.symbolic_engine import EOS, InjectedError, SymbolicEngine, answer_of, greedy
from unit.engine.symbolic_kv import check_books

ENOUGH = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
FREE_LENGTH = {"ignore_eos": True}


def add(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.make_request(prompt, params)
    engine.add(request)
    return request


def run_to_end(engine: Engine, max_steps: int = 2000) -> int:
    for num_steps in range(max_steps):
        if not engine.has_requests:
            return num_steps
        engine.step()
    raise AssertionError(f"not done after {max_steps} steps")


def launches(engine: SymbolicEngine) -> int:
    return sum(fake.num_runs for fake in engine.fakes)


class TestOneStepAhead:
    def test_the_device_has_the_next_step_before_the_tokens_of_a_step_are_waited_for(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        request = add(engine, [1, 2, 3], greedy(5, **FREE_LENGTH))
        seen = []
        while engine.has_requests:
            engine.step(lambda: seen.append((launches(engine), len(request.output_token_ids))))
        assert seen == [(2, 0), (3, 1), (4, 2), (5, 3), (5, 4)]
        assert engine.counts == (4, 0, {"all_end": 1})
        assert request.output_token_ids == answer_of(request)

    def test_who_surely_ends_has_no_row_in_it(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        requests = [add(engine, [n], greedy(n, **FREE_LENGTH)) for n in (2, 5, 3, 4)]
        run_to_end(engine)
        assert [request.output_token_ids for request in requests] == [answer_of(request) for request in requests]
        assert engine.counts == (4, 0, {"all_end": 1})
        assert sum(fake.num_rows for fake in engine.fakes) == 2 + 5 + 3 + 4

    def test_after_a_prompt_rows_take_the_order_in_which_they_run(self) -> None:
        engine = SymbolicEngine(**{**ENOUGH, "max_num_batched_tokens": 8})
        long, short = add(engine, [1] * 5, greedy(9, **FREE_LENGTH)), add(engine, [2] * 7, greedy(9, **FREE_LENGTH))
        late = add(engine, [3], greedy(9, **FREE_LENGTH))
        engine.step()
        assert [request.num_pending_tokens for request in (long, short, late)] == [1, 4, 1]
        engine.step()
        taken = engine.ahead.take()
        assert taken is not None
        assert [row.request for row in taken[0].rows] == engine.scheduler.running == [long, short, late]

    def test_a_request_that_comes_starts_in_the_step_after_it(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        first = add(engine, [1], greedy(9, **FREE_LENGTH))
        engine.step()
        second = add(engine, [2, 3], greedy(9, **FREE_LENGTH))
        engine.step()
        assert (second.num_computed_tokens, engine.counts) == (0, (1, 0, {"waiting": 1}))
        engine.step()
        assert (second.num_computed_tokens, len(first.output_token_ids)) == (2, 3)
        run_to_end(engine)
        assert [r.output_token_ids for r in (first, second)] == [answer_of(first), answer_of(second)]

    def test_a_request_that_cannot_start_holds_nobody_up(self) -> None:
        engine = SymbolicEngine(**{**ENOUGH, "max_num_seqs": 2})
        for number, max_tokens in enumerate((4, 9, 7), start=1):
            add(engine, [number], greedy(max_tokens, **FREE_LENGTH))
        run_to_end(engine)
        # Where the first ends for sure the third may start.
        assert engine.counts == (9, 0, {"waiting": 1, "all_end": 1})

    def test_a_step_is_not_launched_ahead_when_blocks_run_out(self) -> None:
        engine = SymbolicEngine(**{**ENOUGH, "num_blocks": 6})
        requests = [add(engine, [n] * 7, greedy(9, **FREE_LENGTH)) for n in (1, 2)]
        run_to_end(engine)
        assert engine.counts[2]["no_blocks"] >= 1
        assert engine.scheduler.num_preemptions == 1
        assert [request.output_token_ids for request in requests] == [answer_of(request) for request in requests]


class TestVoidRows:
    def ending(self, engine: Engine, num_tokens: int) -> Request:
        """A request that ends by a stop token after so many tokens."""
        whole = answer_of(engine.make_request([7], greedy(20, **FREE_LENGTH)))
        stop = whole[num_tokens - 1]
        assert stop not in whole[: num_tokens - 1]
        return add(engine, [7], greedy(20, ignore_eos=True, stop_token_ids=[stop]))

    def test_a_token_behind_the_end_is_dropped(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        ends, goes_on = self.ending(engine, 3), add(engine, [8], greedy(6, **FREE_LENGTH))
        run_to_end(engine)
        assert (len(ends.output_token_ids), ends.finish_reason) == (3, "stop")
        assert [r.output_token_ids for r in (ends, goes_on)] == [answer_of(ends), answer_of(goes_on)]
        assert engine.counts == (5, 1, {"all_end": 1})

    def test_a_step_of_which_nobody_is_left_is_forgotten_at_once(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        ends = self.ending(engine, 3)
        assert run_to_end(engine) == 3
        assert ends.output_token_ids == answer_of(ends)
        assert engine.counts == (3, 1, {})
        assert engine.ahead.take() is None

    def test_its_blocks_serve_others_at_once(self) -> None:
        """The cache holds one request of this size."""
        engine = SymbolicEngine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False)
        ends, waits = self.ending(engine, 3), add(engine, list(range(1, 15)) + [1] * 6, greedy(8, **FREE_LENGTH))
        engine.scheduler.max_num_seqs = 1
        run_to_end(engine)
        assert [r.output_token_ids for r in (ends, waits)] == [answer_of(ends), answer_of(waits)]
        assert engine.counts[1] == 1

    @pytest.mark.parametrize("seed", range(5))
    def test_nobodys_random_numbers_move(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that requests share neither: the draws of a step are the same as without a void row."""

        def answers() -> list[list[int]]:
            engine = SymbolicEngine(**ENOUGH)
            engine.sampler._shared.manual_seed(seed)
            seeds = (None, 5, None, seed)
            requests = [add(engine, [n], SamplingParams(max_tokens=30, seed=s)) for n, s in enumerate(seeds, start=1)]
            run_to_end(engine)
            found.append(engine.counts)
            return [request.output_token_ids for request in requests]

        found: list[Any] = []
        ahead = answers()
        launch_none_ahead(monkeypatch)
        assert ahead == answers()
        assert {answer[-1] for answer in ahead if len(answer) < 30} == {EOS}
        assert found[0][1] > 0
        assert found[1][:2] == (0, 0)

    @pytest.mark.parametrize("who", [0, 1])
    def test_an_abort_leaves_the_other_as_it_was(self, who: int) -> None:
        engine = SymbolicEngine(**ENOUGH)
        requests = [add(engine, [n], SamplingParams(max_tokens=9, ignore_eos=True, seed=n)) for n in (1, 2)]
        engine.step()
        engine.abort([requests[who].request_id])
        run_to_end(engine)
        assert requests[who].output_token_ids == answer_of(requests[who])[:1]
        assert requests[1 - who].output_token_ids == answer_of(requests[1 - who])
        assert engine.counts[1] == 1

    def test_an_abort_of_all_forgets_the_step(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        requests = [add(engine, [n], greedy(9)) for n in (1, 2)]
        engine.step()
        engine.abort([request.request_id for request in requests])
        assert engine.ahead._launched is None
        assert engine.counts[1] == 2
        check_books(engine.scheduler)


class TestErrors:
    def test_a_launch_that_fails_is_raised_by_its_own_step_and_can_be_tried_again(self) -> None:
        engine = SymbolicEngine(**ENOUGH)
        request = add(engine, [1, 2], SamplingParams(max_tokens=6, ignore_eos=True, seed=3))
        engine.step()
        engine.fakes[1].fails_at = 1
        engine.step()
        assert (len(request.output_token_ids), request.num_computed_tokens) == (2, 3)
        with pytest.raises(InjectedError, match="injected"):
            engine.step()
        assert (len(request.output_token_ids), request.num_computed_tokens) == (2, 3)
        run_to_end(engine)
        assert request.output_token_ids == answer_of(request)
        assert engine.counts[2] == {"raised": 1, "all_end": 1}

    def test_a_failed_launch_of_which_nobody_is_left_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = SymbolicEngine(**ENOUGH)
        request = add(engine, [1, 2], greedy(6))
        engine.fakes[1].fails_at = 1
        engine.step()
        with caplog.at_level(logging.ERROR):
            engine.abort([request.request_id])
        assert "nobody is left in it" in caplog.text
        assert run_to_end(engine) == 0

    def test_an_interrupt_is_raised_at_once_and_books_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = SymbolicEngine(**ENOUGH)
        request = add(engine, [1, 2], greedy(6, **FREE_LENGTH))
        engine.step()

        def interrupted(batch: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine.fakes[1], "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert (len(request.output_token_ids), engine.ahead._launched) == (1, None)
        run_to_end(engine)
        assert request.output_token_ids == answer_of(request)

    def test_logits_that_are_not_finite_stop_the_step_and_the_one_behind_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = SymbolicEngine(**ENOUGH)
        request = add(engine, [1, 2], greedy(6, **FREE_LENGTH))
        run = engine.fakes[0].run
        with monkeypatch.context() as patch:
            patch.setattr(engine.fakes[0], "run", lambda batch: run(batch).fill_(torch.nan))
            with pytest.raises(BreakgraphError, match="not finite"):
                engine.step()
        assert (request.output_token_ids, engine.ahead._launched) == ([], None)
        run_to_end(engine)
        assert request.output_token_ids == answer_of(request)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (greedy(4, logprobs=1), "logprobs"),
        (greedy(4, prompt_logprobs=1), "logprobs"),
    ],
)
def test_what_needs_the_host_between_two_steps(params: SamplingParams, reason: str) -> None:
    engine = SymbolicEngine(**ENOUGH)
    request = add(engine, [1, 2, 3], params)
    run_to_end(engine)
    assert engine.counts[2][reason] > 0
    assert request.output_token_ids == answer_of(request)


def test_penalties_do_not_hold_a_step_up() -> None:
    engine = SymbolicEngine(**ENOUGH)
    request = add(engine, [1, 2, 3], greedy(12, ignore_eos=True, frequency_penalty=1.5))
    run_to_end(engine)
    assert engine.counts == (11, 0, {"all_end": 1})
    assert request.output_token_ids == answer_of(request) != answer_of(engine.make_request([1, 2, 3], greedy(12)))


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
@given(
    wanted=REQUESTS,
    events=EVENTS,
    num_blocks=st.integers(9, 20),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 12),
    enable_prefix_caching=st.booleans(),
)
def test_whatever_happens_answers_are_right_and_no_block_is_lost(
    wanted: list[tuple[list[int], SamplingParams]],
    events: list[str],
    num_blocks: int,
    max_num_seqs: int,
    extra_tokens: int,
    enable_prefix_caching: bool,
) -> None:
    engine = SymbolicEngine(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
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

    def test_verify_and_reports_after_a_step_that_nobody_needs(self, idle: LLM) -> None:
        request = add(idle.engine, [1, 2, 3], greedy(50))
        idle.engine.step()
        idle.engine.abort([request.request_id])
        assert idle.verify().ok
        assert idle.memory_report().buckets
