"""Answers under way, as streams of what is new."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from breakgraph.engine.answer_text import AnswerText
from breakgraph.engine.engine_thread import TokenEvent
from breakgraph.engine.guide import Grammar
from breakgraph.engine.prompts import TokenPrompt
from breakgraph.engine.request import Request
from breakgraph.engine.sampler import TokenLogprobs
from breakgraph.engine.sampling import SamplingParams
from breakgraph.server.async_engine import AsyncEngine
from breakgraph.server.deadline import Deadline
from breakgraph.server.errors import ApiError


@dataclass
class Delta:
    """What is new of one answer."""

    index: int
    text: str
    tokens: list[TokenLogprobs]
    """Log probabilities of the tokens that this text is of, if they were asked for."""
    finish_reason: str | None
    prompt_tokens: list[TokenLogprobs | None] = field(default_factory=list)
    """Those of the prompt, if they were asked for, with what is new first; the first token has none."""

    def append(self, later: Delta) -> None:
        """Takes in what came after it."""
        self.text += later.text
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.prompt_tokens += later.prompt_tokens


class _Answer:
    """One request and its text."""

    def __init__(self, request: Request, text: AnswerText) -> None:
        self.request = request
        self.text = text
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def take(self, index: int, event: TokenEvent) -> Delta:
        """Raises the error that ended the request."""
        if event.error is not None:
            raise event.error
        assert event.token_id is not None, "an event has a token or an error"
        if event.finish_reason == "abort":
            raise ApiError(400, str(event.stop_reason), code="invalid_value")
        self.num_tokens += 1
        self.finish_reason = event.finish_reason
        text, tokens = "", []
        # The token that stops an answer is no part of it.
        if event.finish_reason != "stop":
            text = self.text.append(event.token_id)
            tokens = [event.logprobs] if event.logprobs is not None else []
        if self.text.stop_reason is not None:
            self.finish_reason = "stop"
        elif event.is_last:
            text += self.text.finish()
        prompt: list[TokenLogprobs | None] = []
        if self.num_tokens == 1 and self.request.params.prompt_logprobs is not None:
            prompt = [None, *self.request.prompt_logprobs]
        return Delta(index, text, tokens, self.finish_reason, prompt)


class _PromptTokens:
    """Gives the log probabilities of a prompt, computed for its first answer, to the others, which wait for them."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self._found: dict[int, list[TokenLogprobs | None]] = {}
        self._held: dict[int, Delta] = {}
        self._begun: set[int] = set()

    def pass_on(self, delta: Delta) -> list[Delta]:
        """The deltas that may go out now."""
        group, number = divmod(delta.index, self._num_answers)
        if number == 0:
            if not delta.prompt_tokens:
                return [delta]
            self._found[group] = list(delta.prompt_tokens)
            waiting = [index for index in self._held if index // self._num_answers == group]
            return [delta, *(self._begin(self._held.pop(index)) for index in waiting)]
        if delta.index in self._begun:
            return [delta]
        if group in self._found:
            return [self._begin(delta)]
        if delta.index in self._held:
            self._held[delta.index].append(delta)
        else:
            self._held[delta.index] = delta
        return []

    def _begin(self, delta: Delta) -> Delta:
        self._begun.add(delta.index)
        delta.prompt_tokens = list(self._found[delta.index // self._num_answers])
        return delta


class Generation:
    """The n answers to each of some prompts, as an asynchronous context manager that aborts what is left at its end.

    Answers are numbered through: those to the first prompt, those to the second.

    Args:
        engine: where they run.
        prompts: one or more.
        params: of every answer; n is not looked at.
        num_answers: to each prompt.
        stop_strings: each ends the answer that it appears in.
        deadline: of all answers together.
        grammar: of the form that the params ask for, if they do.

    Raises:
        QueueFullError, PromptError: nothing was queued.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[TokenPrompt],
        params: SamplingParams,
        *,
        num_answers: int,
        stop_strings: Sequence[str],
        deadline: Deadline,
        grammar: Grammar | None = None,
    ) -> None:
        self.prompts = prompts
        self._engine = engine
        self._deadline = deadline
        make_request = engine.engine.make_request
        requests = [
            make_request(prompt.token_ids, params, index=index, with_text=False, grammar=grammar)
            for prompt in prompts
            for index in range(num_answers)
        ]
        self._answers = [
            _Answer(request, AnswerText(engine.tokenizer, request.prompt_token_ids, stop_strings))
            for request in requests
        ]
        self._index_of = {request.request_id: index for index, request in enumerate(requests)}
        self._num_answers_per_prompt = num_answers
        self._prompt_tokens = None if params.prompt_logprobs is None else _PromptTokens(num_answers)
        self._events = engine.submit(requests)
        self._timings = [engine.metrics.start_answer() for _ in requests]

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def prompt_of(self, index: int) -> TokenPrompt:
        return self.prompts[index // self._num_answers_per_prompt]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the answers that have not ended. A second call does nothing."""
        left = [answer for answer in self._answers if answer.finish_reason is None]
        for answer in left:
            answer.finish_reason = "abort"
            self._timings[self._index_of[answer.request.request_id]].end("abort")
        self._engine.abort([answer.request for answer in left])

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self.deltas()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Until all answers have ended. What came in while nobody looked is one delta an answer, so that a server that
        cannot keep up sends fewer parts instead of older ones.

        Raises ApiError 408 after the deadline, and what made the engine drop an answer.
        """
        while any(answer.finish_reason is None for answer in self._answers):
            merged: dict[int, Delta] = {}
            failure: Exception | None = None
            for event in await self._next_events():
                try:
                    delta = self._take(event)
                except Exception as error:
                    failure = error
                    break
                for ready in self._ready(delta):
                    if ready.index in merged:
                        merged[ready.index].append(ready)
                    else:
                        merged[ready.index] = ready
            for delta in merged.values():
                yield delta
            if failure is not None:
                raise failure

    def _ready(self, delta: Delta | None) -> list[Delta]:
        if delta is None:
            return []
        return [delta] if self._prompt_tokens is None else self._prompt_tokens.pass_on(delta)

    def _take(self, event: TokenEvent) -> Delta | None:
        """None for what a step made beside the end of an answer. Raises what ended the answer."""
        index = self._index_of[event.request.request_id]
        answer = self._answers[index]
        if answer.finish_reason is not None:
            return None
        delta = answer.take(index, event)
        self._timings[index].token()
        if delta.finish_reason is not None:
            self._timings[index].end(delta.finish_reason)
            if event.is_last:
                self._engine.forget([answer.request])
            else:
                self._engine.abort([answer.request])
        return delta

    async def _next_events(self) -> list[TokenEvent]:
        """One at least, and all that are there."""
        async with self._deadline.kept():
            events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, whatever n is."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_new = sum(answer.num_tokens for answer in self._answers)
        first_answers = self._answers[:: self._num_answers_per_prompt]
        num_cached = sum(answer.request.num_cached_tokens or 0 for answer in first_answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
