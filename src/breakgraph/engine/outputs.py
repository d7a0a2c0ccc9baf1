"""What a request gives back: the names of vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breakgraph.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `token_ids` hold the token that ended it; `text` holds neither a stop string nor special tokens."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """"stop" (end of sequence, stop string or stop token), "length" (max_tokens or the context), "abort" (given up)."""
    stop_reason: int | str | None
    """The stop string or stop token that ended it, or why it was given up; None for the end of sequence."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`; None when they were not asked for."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None
    """None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache when the request started."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, None for the first; None altogether when they were not asked for."""
