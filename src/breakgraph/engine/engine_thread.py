"""An engine in a thread of its own. Requests come from any thread, and their tokens go out once a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from breakgraph.engine.engine import Engine
from breakgraph.engine.request import Request
from breakgraph.engine.sampler import TokenLogprobs
from breakgraph.errors import ClosedError, QueueFullError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class TokenEvent:
    """One step's news of one request: a token, its end, or both."""

    request: Request
    token_id: int | None
    """None when the request ended without one: by an error, or because the engine was closed."""
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    """Why the request could not go on; it is then gone, with the tokens that it had."""

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


Publish = Callable[[list[TokenEvent]], None]
"""Called in the engine's thread; it must neither block nor raise."""


class EngineThread:
    """Steps an engine while there are requests, and sleeps when there are none.

    Where the device works beside the host, the tokens of a step go out when the device has the next step: publishing
    them, and all that their readers do with them, takes none of its time. The emulated device is the host, so there
    they go out at once.

    From `start` to `close` the engine belongs to the thread; only `Engine.make_request` may be called from elsewhere.
    Owns: the thread, not the engine. Thread-safe.

    Args:
        engine: captured, and without requests.
        publish: takes the events of each step.
        max_waiting: requests accepted beyond the `max_num_seqs` that run.
    """

    def __init__(self, engine: Engine, publish: Publish, *, max_waiting: int) -> None:
        self.engine = engine
        self._publish = publish
        self.capacity = engine.config.sizes.max_num_seqs + max_waiting
        """Requests that may be here at the same time."""
        self._changed = threading.Condition()
        self._commands: list[Callable[[Engine], None]] = []
        self._live: dict[str, Request] = {}
        self._is_closing = False
        self._num_sent: dict[str, int] = {}
        self._unsent: list[Request] = []
        """Requests with news of the last step, while the next one is given to the device."""
        self._has_own_device = torch.device(engine.config.device).type != "cpu"
        self.num_failed_steps_in_a_row = 0
        self._thread = threading.Thread(target=self._run, name="breakgraph-engine", daemon=True)

    @property
    def num_live(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._live)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def add(self, requests: Sequence[Request]) -> None:
        """Queues all of the requests or none.

        Raises QueueFullError when they are more than there is room for, ClosedError after `close`.
        """
        with self._changed:
            self._check_open()
            self.check_room(len(requests))
            self._live.update((request.request_id, request) for request in requests)
            self._commands.append(lambda engine: self._add(engine, requests))
            self._changed.notify()

    def check_room(self, num_requests: int) -> None:
        """Raises QueueFullError when there is no room for so many more; there may be none a moment later."""
        if len(self._live) + num_requests > self.capacity:
            raise QueueFullError(
                f"{len(self._live)} requests are running or waiting, {self.capacity} may be, and {num_requests} "
                "came; try again later"
            )

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops requests and frees their blocks before the next step is made; one that was launched ahead may have rows
        of theirs. No event follows; unknown ids are ignored."""
        ids = list(request_ids)
        with self._changed:
            self._commands.append(lambda engine: self._abort(engine, ids))
            self._changed.notify()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Calls `function` between two steps, in the engine's thread; the future has what it returns or raises."""
        future: Future[T] = Future()

        def run(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)

        with self._changed:
            self._check_open()
            self._commands.append(run)
            self._changed.notify()
        return future

    def close(self) -> None:
        """Ends the requests that are left, each with an event, and the thread. A second call does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        device = torch.device(self.engine.config.device)
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            while not self._is_closing:
                for command in self._next_commands():
                    command(self.engine)
                if self.engine.has_requests:
                    self._step()
                else:
                    self._send()
        except BaseException:
            logger.exception("the engine's thread stops")
            raise
        finally:
            with self._changed:
                self._is_closing = True
                commands, self._commands = self._commands, []
                left = list(self._live.values())
            # A request added last is known to the engine only after its command.
            for command in commands:
                command(self.engine)
            self._send()
            left = [request for request in left if request.request_id in self._live]
            self._end(left, ClosedError("the engine was closed while the request was running"))

    def _next_commands(self) -> list[Callable[[Engine], None]]:
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._is_closing or self.engine.has_requests)
            commands, self._commands = self._commands, []
        return commands

    def _add(self, engine: Engine, requests: Sequence[Request]) -> None:
        for request in requests:
            self._num_sent[request.request_id] = 0
            engine.add(request)

    def _abort(self, engine: Engine, request_ids: Sequence[str]) -> None:
        engine.abort(request_ids)
        self._forget(request_ids)

    def _step(self) -> None:
        try:
            finished = self.engine.step(self._send)
        except Exception as error:
            self.num_failed_steps_in_a_row += 1
            logger.exception("a step failed; the requests in it are dropped")
            self._send()
            scheduler = self.engine.scheduler
            self._end(list(scheduler.running or scheduler.waiting), error)
            return
        self.num_failed_steps_in_a_row = 0
        self._unsent = [*self.engine.scheduler.running, *finished]
        if not (self._has_own_device and self.engine.has_requests):
            self._send()

    def _send(self) -> None:
        """Publishes what the last step brought, unless that was done or the request was aborted since."""
        unsent, self._unsent = self._unsent, []
        unsent = [request for request in unsent if request.request_id in self._num_sent]
        events = [event for request in unsent for event in self._news(request)]
        self._forget([request.request_id for request in unsent if request.is_finished])
        if events:
            self._publish(events)

    def _news(self, request: Request) -> list[TokenEvent]:
        first = self._num_sent[request.request_id]
        tokens, logprobs = request.output_token_ids[first:], request.output_logprobs[first:]
        self._num_sent[request.request_id] = first + len(tokens)
        events = [
            TokenEvent(request, token_id, logprobs[index] if logprobs else None)
            for index, token_id in enumerate(tokens)
        ]
        if request.is_finished:
            last = events.pop()
            events.append(TokenEvent(request, last.token_id, last.logprobs, request.finish_reason, request.stop_reason))
        return events

    def _end(self, requests: Sequence[Request], error: Exception) -> None:
        """Drops requests and says why."""
        if not requests:
            return
        request_ids = [request.request_id for request in requests]
        self.engine.abort(request_ids)
        self._forget(request_ids)
        self._publish([TokenEvent(request, None, error=error) for request in requests])

    def _forget(self, request_ids: Iterable[str]) -> None:
        with self._changed:
            for request_id in request_ids:
                self._live.pop(request_id, None)
                self._num_sent.pop(request_id, None)

    def _check_open(self) -> None:
        if self._is_closing:
            raise ClosedError("the engine was closed; make a new LLM")
