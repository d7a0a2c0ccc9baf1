"""Steps that are launched before the tokens of the step before them are known: when, what of them is void, errors."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch

from breakgraph import SamplingParams
from breakgraph.engine.engine import Engine
from breakgraph.engine.request import Request
from breakgraph.errors import BreakgraphError
from unit.engine.small import launch_none_ahead
from unit.engine.symbolic_engine import (
    ENOUGH,
    EOS,
    FREE_LENGTH,
    InjectedError,
    SymbolicEngine,
    add,
    answer_of,
    greedy,
    run_to_end,
)
from unit.engine.symbolic_kv import check_books


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

    def test_the_last_chunk_of_a_prompt_has_one_behind_it(self) -> None:
        engine = SymbolicEngine(**{**ENOUGH, "max_num_batched_tokens": 8})
        requests = [add(engine, prompt, greedy(9, **FREE_LENGTH)) for prompt in ([1] * 5, [2] * 7, [3])]
        engine.step()
        assert [request.num_pending_tokens for request in requests] == [1, 4, 1]
        assert engine.counts == (0, 0, {"chunks": 1})
        engine.step()
        assert engine.counts == (1, 0, {"chunks": 1})
        taken = engine.ahead.take()
        assert taken is not None
        assert [row.request for row in taken[0].rows] == engine.scheduler.running == requests

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

    def test_what_a_failed_launch_held_goes_with_its_exception(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = SymbolicEngine(**ENOUGH)
        add(engine, [1, 2], greedy(6, **FREE_LENGTH))
        held = []

        def fails(batch: object) -> None:
            activation = torch.zeros(1)
            held.append(weakref.ref(activation))
            raise InjectedError("no memory")

        monkeypatch.setattr(engine.fakes[1], "run", fails)
        gc.disable()
        try:
            engine.step()
            with pytest.raises(InjectedError):
                engine.step()
            assert [ref() for ref in held] == [None]
        finally:
            gc.enable()

    def test_a_step_is_booked_even_if_the_tokens_of_the_next_cannot_be_picked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = SymbolicEngine(**ENOUGH)
        ends, goes_on = (add(engine, [n], greedy(n, **FREE_LENGTH)) for n in (2, 5))
        engine.step()

        def no_memory(*args: object) -> None:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr("breakgraph.engine.ahead.put", no_memory)
            engine.step()
            assert (len(ends.output_token_ids), len(goes_on.output_token_ids)) == (2, 2)
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
        run_to_end(engine)
        assert goes_on.output_token_ids == answer_of(goes_on)
        assert engine.counts[2]["raised"] == 1

    def test_a_failed_launch_of_which_nobody_is_left_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = SymbolicEngine(**ENOUGH)
        request = add(engine, [1, 2], greedy(6))
        engine.fakes[1].fails_at = 1
        engine.step()
        with caplog.at_level(logging.ERROR):
            engine.abort([request.request_id])
        assert "launched ahead failed, and is not needed" in caplog.text
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


class AnyToken:
    """A form that every answer has."""

    failure = None

    def allowed(self) -> torch.Tensor:
        return torch.tensor([-1], dtype=torch.int32)

    def wait(self, timeout_sec: float) -> None:
        pass

    def accept(self, token_id: int) -> None:
        pass


@pytest.mark.parametrize(
    ("params", "guide", "expected"),
    [
        (greedy(4, logprobs=1, **FREE_LENGTH), None, (0, 0, {"logprobs": 4})),
        # Once the prompt is through it is a request like others.
        (greedy(4, prompt_logprobs=1, **FREE_LENGTH), None, (3, 0, {"logprobs": 2, "all_end": 1})),
        (greedy(4, **FREE_LENGTH), AnyToken(), (0, 0, {"guides": 4})),
    ],
)
def test_what_needs_the_host_between_two_steps(params: SamplingParams, guide: AnyToken | None, expected: Any) -> None:
    engine = SymbolicEngine(**ENOUGH)
    request = add(engine, [1, 2, 3], params)
    request.guide = guide
    run_to_end(engine)
    assert engine.counts == expected
    assert request.output_token_ids == answer_of(request)


def test_penalties_do_not_hold_a_step_up() -> None:
    engine = SymbolicEngine(**ENOUGH)
    request = add(engine, [1, 2, 3], greedy(12, ignore_eos=True, frequency_penalty=1.5))
    run_to_end(engine)
    assert engine.counts == (11, 0, {"all_end": 1})
    assert request.output_token_ids == answer_of(request) != answer_of(engine.make_request([1, 2, 3], greedy(12)))
