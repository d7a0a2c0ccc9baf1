"""The engine's thread, the tokenizer and grammars as seen from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from breakgraph.engine.engine import Engine
from breakgraph.engine.engine_thread import EngineThread, TokenEvent
from breakgraph.engine.guide import Grammar
from breakgraph.engine.guided_params import GuidedDecodingParams
from breakgraph.engine.guided_process import GuideProcesses
from breakgraph.engine.prompts import TokenPrompt, apply_chat_template, encode
from breakgraph.engine.request import Request
from breakgraph.errors import ConfigError, PromptTooLongError
from breakgraph.server.errors import ApiError
from breakgraph.server.metrics import Metrics

T = TypeVar("T")

_MAX_COMPILING = 4
"""Grammars at the same time; the others wait for them."""
_MAX_FAILED_STEPS = 3
"""So many steps that fail one after the other are no fault of the requests in them."""


class AsyncEngine:
    """Owns: the engine's thread, one for the tokenizer, and grammars with the threads that wait for them; not the
    engine. All methods belong to one event loop.

    Raises ConfigError for an engine without a tokenizer.
    """

    def __init__(self, engine: Engine, *, max_waiting: int, metrics: Metrics) -> None:
        if engine.tokenizer is None:
            raise ConfigError(
                f"a server needs a tokenizer, and {engine.config.model} has none; give a folder with tokenizer.json"
            )
        self.engine = engine
        self.tokenizer: Any = engine.tokenizer
        self.metrics = metrics
        self._thread = EngineThread(engine, self._publish, max_waiting=max_waiting)
        self._tokenizing = ThreadPoolExecutor(1, "breakgraph-tokenizer")
        self.grammars = GuideProcesses(self.tokenizer, engine.facts.vocab_size, engine.facts.eos_token_ids)
        self._compiling = ThreadPoolExecutor(_MAX_COMPILING, "breakgraph-grammar")
        self._compilations: dict[GuidedDecodingParams, asyncio.Future[Grammar]] = {}
        self._max_chars_per_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._num_compiling = 0
        """Answers that wait for their grammars; there must be room for them, too."""

    @property
    def capacity(self) -> int:
        """Answers that may run and wait at the same time."""
        return self._thread.capacity

    @property
    def failure(self) -> str | None:
        """Why no request can be served any more; None while all is well."""
        if not self._thread.is_alive:
            return "the engine has stopped"
        if self._thread.num_failed_steps_in_a_row >= _MAX_FAILED_STEPS:
            return f"the last {self._thread.num_failed_steps_in_a_row} steps failed"
        return None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Ends what still runs, and all threads. Waits for the step under way. A second call does nothing."""
        self._thread.close()
        self._tokenizing.shutdown()
        self.grammars.close()
        self._compiling.shutdown(cancel_futures=True)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """`function` between two steps."""
        return await asyncio.wrap_future(self._thread.call(function))

    def check_length(self, num_chars: int) -> None:
        """Raises PromptTooLongError for a text that cannot fit the context, however it is cut into tokens."""
        max_model_len = self.engine.config.sizes.max_model_len
        if num_chars > max_model_len * self._max_chars_per_token:
            raise PromptTooLongError(
                f"the prompt has {num_chars} characters, more than {max_model_len} tokens can hold; shorten it"
            )

    async def encode(self, text: str) -> TokenPrompt:
        self.check_length(len(text))
        token_ids = await self._in_tokenizer_thread(lambda: encode(self.tokenizer, text))
        return TokenPrompt(token_ids, text)

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> TokenPrompt:
        """Raises ApiError when the template refuses the messages, ConfigError when there is none."""
        from jinja2 import TemplateError

        self.check_length(sum(len(message["content"]) for message in messages))
        model = self.engine.config.model
        try:
            return await self._in_tokenizer_thread(lambda: apply_chat_template(self.tokenizer, messages, model))
        except TemplateError as error:
            raise ApiError(400, f"the chat template refuses the messages: {error}", param="messages") from error

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self._in_tokenizer_thread(lambda: str(self.tokenizer.decode(list(token_ids))))

    async def compile(self, params: GuidedDecodingParams, num_answers: int) -> Grammar:
        """A grammar for so many answers. Those who ask for the same one at the same time wait for one compilation.

        Raises QueueFullError before anything is compiled, ConfigError, ClosedError and BreakgraphError as
        GuideProcesses.
        """
        self._thread.check_room(self._num_compiling + num_answers)
        self._num_compiling += num_answers
        try:
            return await asyncio.shield(self._compilations.get(params) or self._start_compiling(params))
        finally:
            self._num_compiling -= num_answers

    def _start_compiling(self, params: GuidedDecodingParams) -> asyncio.Future[Grammar]:
        loop = asyncio.get_running_loop()
        compilation: asyncio.Future[Grammar] = loop.run_in_executor(self._compiling, self.grammars.compile, params)

        def forget(done: asyncio.Future[Grammar]) -> None:
            del self._compilations[params]
            if not done.cancelled():
                done.exception()  # perhaps nobody waits for it any more

        self._compilations[params] = compilation
        compilation.add_done_callback(forget)
        return compilation

    async def _in_tokenizer_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    def submit(self, requests: Sequence[Request]) -> asyncio.Queue[TokenEvent]:
        """Queues all or none; their events come in one queue. Raises QueueFullError, ClosedError."""
        queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._queues.update((request.request_id, queue) for request in requests)
        try:
            self._thread.add(requests)
        except BaseException:
            self.forget(requests)
            raise
        return queue

    def forget(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._queues.pop(request.request_id, None)

    def abort(self, requests: Sequence[Request]) -> None:
        """Drops requests; nothing more comes of them."""
        self.forget(requests)
        self._thread.abort([request.request_id for request in requests])

    def _publish(self, events: list[TokenEvent]) -> None:
        """In the engine's thread: one wake-up of the loop a step."""
        assert self._loop is not None, "start() comes first"
        with suppress(RuntimeError):  # a loop that was closed has nobody who waits
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            queue = self._queues.get(event.request.request_id)
            if queue is not None:
                queue.put_nowait(event)
