"""An engine in its own thread: what comes out, what an abort frees and when, and what a failed step leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue

import pytest

from breakgraph import LLM, SamplingParams
from breakgraph.engine.engine import Engine
from breakgraph.engine.engine_thread import EngineThread, TokenEvent
from breakgraph.engine.request import Request
from breakgraph.errors import ClosedError, QueueFullError
from unit.engine.small import SMALL, Reference

PROMPTS = [[1, 2, 3], [4] * 30, [5, 6]]


class Gate:
    """Lets an engine's steps through one at a time, and keeps how many blocks were free before each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_free: list[int] = []
        self._allowed = threading.Semaphore(0)
        self._arrived: Queue[None] = Queue()
        step = engine.step

        def gated(meanwhile: Callable[[], None] = lambda: None) -> list[Request]:
            self.num_free.append(engine.scheduler.allocator.num_free)
            self._arrived.put(None)
            self._allowed.acquire()
            return step(meanwhile)

        monkeypatch.setattr(engine, "step", gated)

    def wait(self) -> None:
        """Until the next step is about to run."""
        self._arrived.get()

    def open(self, num_steps: int = 1) -> None:
        self._allowed.release(num_steps)


class Events:
    """Of all requests, in the order they came."""

    def __init__(self) -> None:
        self._queue: Queue[TokenEvent] = Queue()

    def publish(self, events: list[TokenEvent]) -> None:
        for event in events:
            self._queue.put(event)

    def until_ended(self, num_requests: int) -> dict[str, list[TokenEvent]]:
        found: dict[str, list[TokenEvent]] = {}
        while num_requests:
            event = self._queue.get()
            found.setdefault(event.request.request_id, []).append(event)
            num_requests -= event.is_last
        return found


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def thread(idle: LLM, events: Events) -> Iterator[EngineThread]:
    thread = EngineThread(idle.engine, events.publish, max_waiting=4)
    thread.start()
    yield thread
    thread.close()


def make(engine: Engine, prompt: list[int], max_tokens: int = 8) -> Request:
    return engine.make_request(prompt, SamplingParams(temperature=0, max_tokens=max_tokens), with_text=False)


def test_tokens_come_one_by_one_and_are_transformers_own(
    thread: EngineThread, events: Events, reference: Reference
) -> None:
    requests = [make(thread.engine, prompt) for prompt in PROMPTS]
    thread.add(requests)
    found = events.until_ended(3)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        mine = found[request.request_id]
        assert [event.token_id for event in mine] == reference(prompt, 8)
        assert [event.finish_reason for event in mine] == [None] * 7 + ["length"]
    assert thread.num_live == 0


def test_requests_of_many_threads_at_once(thread: EngineThread, events: Events, reference: Reference) -> None:
    requests = [make(thread.engine, [i, i + 1, 2], 4) for i in range(12)]
    adders = [threading.Thread(target=thread.add, args=([request],)) for request in requests]
    for adder in adders:
        adder.start()
    found = events.until_ended(12)
    for request in requests:
        tokens = [event.token_id for event in found[request.request_id]]
        assert tokens == reference(request.prompt_token_ids, 4)
    for adder in adders:
        adder.join()


def test_an_abort_frees_the_blocks_before_the_next_step(
    idle: LLM, events: Events, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(idle.engine, monkeypatch)
    thread = EngineThread(idle.engine, events.publish, max_waiting=4)
    thread.start()
    stays, goes = make(idle.engine, [1, 2, 3], 6), make(idle.engine, [7] * 10, 100)
    thread.add([stays, goes])
    gate.wait()
    gate.open()
    gate.wait()
    assert gate.num_free == [64, 62]
    thread.abort([goes.request_id, "nobody"])
    gate.open(100)
    found = events.until_ended(1)
    # The step that had begun, and then its block was free.
    assert gate.num_free[2] == 63
    assert [event.token_id for event in found[stays.request_id]] == reference([1, 2, 3], 6)
    # A device of its own has the next step before the tokens of the last one go out.
    assert len(found[goes.request_id]) == (1 if thread._has_own_device else 2)
    thread.close()


def test_a_waiting_request_can_be_aborted(idle: LLM, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(idle.engine, monkeypatch)
    thread = EngineThread(idle.engine, events.publish, max_waiting=4)
    thread.start()
    requests = [make(idle.engine, [i], 2) for i in range(10)]
    thread.add(requests)
    thread.abort([requests[9].request_id])
    gate.open(100)
    found = events.until_ended(9)
    assert requests[9].request_id not in found
    thread.close()
    assert thread.num_live == 0


def test_more_than_fit_are_refused_and_none_of_them_is_queued(
    idle: LLM, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(idle.engine, monkeypatch)
    thread = EngineThread(idle.engine, events.publish, max_waiting=4)
    thread.start()
    thread.add([make(idle.engine, [i], 1) for i in range(10)])
    with pytest.raises(QueueFullError, match="10 requests are running or waiting, 12 may be, and 3 came"):
        thread.add([make(idle.engine, [1], 1) for _ in range(3)])
    thread.add([make(idle.engine, [1], 1) for _ in range(2)])
    assert thread.num_live == 12
    gate.open(100)
    assert len(events.until_ended(12)) == 12
    thread.add([make(idle.engine, [1], 1)])
    assert len(events.until_ended(1)) == 1
    thread.close()


def test_a_failed_step_ends_its_requests_and_the_others_go_on(
    idle: LLM, events: Events, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = idle.engine.step, iter(range(1_000))

    def failing(meanwhile: Callable[[], None]) -> list[Request]:
        # The second step; by then eight run, and two wait.
        if next(calls) == 1:
            raise RuntimeError("injected")
        return step(meanwhile)

    monkeypatch.setattr(idle.engine, "step", failing)
    thread = EngineThread(idle.engine, events.publish, max_waiting=4)
    requests = [make(idle.engine, [i], 3) for i in range(10)]
    thread.start()
    thread.add(requests)
    found = events.until_ended(10)
    errors = [found[request.request_id][-1].error for request in requests]
    assert [str(error) for error in errors[:8]] == ["injected"] * 8
    assert errors[8:] == [None, None]
    for request in requests[8:]:
        tokens = [event.token_id for event in found[request.request_id]]
        assert tokens == reference(request.prompt_token_ids, 3)
    assert thread.num_failed_steps_in_a_row == 0
    thread.close()


def test_close_ends_what_runs_with_an_error_and_refuses_more(
    idle: LLM, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(idle.engine, monkeypatch)
    thread = EngineThread(idle.engine, events.publish, max_waiting=4)
    thread.start()
    request = make(idle.engine, [1, 2], 100)
    thread.add([request])
    gate.open(3)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread._is_closing:
        time.sleep(0.001)
    gate.open(1000)
    closing.join()
    last = events.until_ended(1)[request.request_id][-1]
    assert isinstance(last.error, ClosedError)
    with pytest.raises(ClosedError, match="the engine was closed"):
        thread.add([request])
    with pytest.raises(ClosedError):
        thread.call(lambda engine: None)
    thread.close()


def test_calls_run_between_steps_and_give_back_what_they_return_or_raise(thread: EngineThread) -> None:
    assert thread.call(lambda engine: threading.current_thread().name).result() == "breakgraph-engine"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result()
    assert thread.is_alive


def test_small_is_what_these_tests_count_with() -> None:
    assert (SMALL["max_num_seqs"], SMALL["num_gpu_blocks_override"]) == (8, 65)
