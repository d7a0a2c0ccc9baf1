"""The two completion endpoints: from a checked body to answers under way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from breakgraph.engine.guide import Grammar
from breakgraph.engine.prompts import TokenPrompt
from breakgraph.errors import ConfigError, PromptError
from breakgraph.server.answering import Envelope, EventStream, answer_whole
from breakgraph.server.async_engine import AsyncEngine
from breakgraph.server.config import ServerConfig
from breakgraph.server.deadline import Deadline
from breakgraph.server.errors import ApiError, as_api_error
from breakgraph.server.forms import ChatForm, CompletionForm, Echo, Form
from breakgraph.server.generation import Generation
from breakgraph.server.protocol import ChatRequest, CompletionRequest, GenerationRequest

_DEFAULT_MAX_TOKENS = 16
"""Of plain completions, as in OpenAI's API; a chat message may fill the context."""


class Service:
    """One model and how it is served. Owns nothing."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.model = config.served_model_name or engine.engine.config.model
        self.max_model_len = engine.engine.config.sizes.max_model_len
        self.started_at = int(time.time())

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions. Raises ApiError, PromptError, QueueFullError."""
        deadline = Deadline(self.config.request_timeout)
        self.check_model(body.model)
        given = _prompts(body)
        self._check_count(len(given), body.num_answers)
        with _blaming("prompt"):
            prompts = [await self._tokenize(prompt) for prompt in given]
        max_tokens = self._max_tokens(prompts, body.max_tokens, _DEFAULT_MAX_TOKENS)
        grammar = await self._compile(body, len(prompts) * body.num_answers, deadline)
        params = body.sampling_params(max_tokens, body.logprobs)
        echoed: list[Echo] = []
        if body.echo:
            texts = [p.text if p.text is not None else await self.engine.decode(p.token_ids) for p in prompts]
            echoes = [Echo(text, prompt.token_ids) for text, prompt in zip(texts, prompts, strict=True)]
            echoed = [echo for echo in echoes for _ in range(body.num_answers)]
        form = CompletionForm(self.engine.tokenizer, echoed, has_logprobs=body.logprobs is not None)
        with _blaming("prompt"):
            generation = Generation(
                self.engine,
                prompts,
                params,
                num_answers=body.num_answers,
                stop_strings=body.stop_strings,
                deadline=deadline,
                grammar=grammar,
            )
        return await self._respond(generation, form, body, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions. Raises as `complete`."""
        deadline = Deadline(self.config.request_timeout)
        self.check_model(body.model)
        self._check_count(1, body.num_answers)
        with _blaming("messages"):
            prompt = await self.engine.encode_chat([message.for_template() for message in body.messages])
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = self._max_tokens([prompt], max_tokens, self.max_model_len)
        grammar = await self._compile(body, body.num_answers, deadline)
        params = body.sampling_params(max_tokens, logprobs)
        form = ChatForm(self.engine.tokenizer, has_logprobs=logprobs is not None)
        with _blaming("messages"):
            generation = Generation(
                self.engine,
                [prompt],
                params,
                num_answers=body.num_answers,
                stop_strings=body.stop_strings,
                deadline=deadline,
                grammar=grammar,
            )
        return await self._respond(generation, form, body, request)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for another model than the one served."""
        if name != self.model:
            message = f"the model {name[:200]!r} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _respond(self, generation: Generation, form: Form, body: GenerationRequest, request: Request) -> Response:
        envelope = Envelope(form, self.model)
        if body.stream:
            return EventStream(generation, form, envelope, include_usage=body.include_usage)
        return await answer_whole(request.receive, generation, form, envelope)

    async def _tokenize(self, prompt: str | list[int]) -> TokenPrompt:
        return await self.engine.encode(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)

    async def _compile(self, body: GenerationRequest, num_answers: int, deadline: Deadline) -> Grammar | None:
        """The form that the body asks for. Raises ApiError, QueueFullError, and what keeps grammars from being made."""
        try:
            params = body.guided_decoding()
            if params is None:
                return None
            async with deadline.kept():
                return await self.engine.compile(params, num_answers)
        except ConfigError as error:
            raise ApiError(400, str(error), param=body.form_param, code="invalid_value") from error

    def _check_count(self, num_prompts: int, num_answers: int) -> None:
        if num_prompts * num_answers > self.engine.capacity:
            raise ApiError(
                400,
                f"{num_prompts} prompts with n={num_answers} are {num_prompts * num_answers} answers, and the server "
                f"takes {self.engine.capacity} at a time; send fewer",
                param="n" if num_prompts == 1 else "prompt",
            )

    def _max_tokens(self, prompts: Sequence[TokenPrompt], asked: int | None, default: int) -> int:
        """Raises ApiError when a prompt leaves no room for what is asked; a default is cut by the engine."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if asked is not None and longest < self.max_model_len < longest + asked:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens and max_tokens={asked}, together more than the {self.max_model_len} "
                "of this server; shorten one of them",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return default if asked is None else asked


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Names the parameter that a prompt which cannot be used came in."""
    try:
        yield
    except PromptError as error:
        refusal = as_api_error(error)
        refusal.param = param
        raise refusal from error


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]
