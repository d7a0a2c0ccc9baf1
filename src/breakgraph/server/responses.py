"""What clients get, as OpenAI's API has it."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class AssistantMessage(TypedDict):
    role: str
    content: str


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


class Health(TypedDict):
    status: str


class _Setting(TypedDict):
    model: str
    device: str
    emulated: bool
    dtype: str
    max_model_len: int


class _EngineState(TypedDict):
    phases: list[dict[str, Any]]
    requests: dict[str, int]
    prefix_cache: dict[str, int]
    memory: dict[str, int]


class GraphsState(_Setting, _EngineState):
    """Of one engine."""


class ReplicaState(_EngineState):
    replica: str


class ReplicaGraphs(_Setting):
    """Of several engines behind one port."""

    replicas: list[ReplicaState]
