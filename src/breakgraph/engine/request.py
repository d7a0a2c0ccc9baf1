"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from breakgraph.engine.detokenizer import Detokenizer, find_stop
from breakgraph.engine.outputs import CompletionOutput, RequestOutput
from breakgraph.engine.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from breakgraph.engine.guide import Guide
    from breakgraph.engine.prefix_cache import PrefixNode
    from breakgraph.engine.sampler import TokenLogprobs


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Request:
    """Prompt, answer so far, and how much of both is in the KV cache.

    The scheduler owns `status`, `block_ids`, `prefix_node`, `num_computed_tokens` and `num_cached_tokens`; tokens are
    added through `append_token`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and answer together: max_tokens, cut to the context."""
    index: int = 0
    """Which of the n answers to its prompt this is."""
    adapter_id: str | None = None
    """Requests share cached blocks only with those of the same adapter; None is the model alone."""
    eos_token_ids: frozenset[int] = frozenset()
    detokenizer: Detokenizer | None = None
    generator: torch.Generator | None = None
    guide: Guide | None = None
    """Where a guided answer is in its grammar."""
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One an output token if the params ask for them, else none."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, if the params ask for them, else none."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache; 0 again when the request is preempted."""
    num_cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache when the request first started; None before."""
    block_ids: list[int] = field(default_factory=list)
    """Grows at its end, or is replaced by another list."""
    prefix_node: PrefixNode | None = None
    """Where the prefix cache has the last full block of the computed tokens."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _text_end: int | None = None
    _block_table: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _tabled_ids: list[int] | None = None
    """The `block_ids` that the table was made of, when it had as many."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens whose KV is still to be computed; 1 while decoding."""
        # `num_tokens` spelled out: each row of a step is asked several times.
        return len(self.prompt_token_ids) + len(self.output_token_ids) - self.num_computed_tokens

    @property
    def ends_by_next_token(self) -> bool:
        """Whether its next token is the last one, whatever it is."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + 1 >= self.max_total_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some are still missing."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) + 1 < self.num_prompt_tokens

    @property
    def max_next_tokens(self) -> int:
        """Pending tokens that a step may compute: it gives logits for the last one only."""
        if not self.wants_prompt_logprobs:
            return self.num_pending_tokens
        return len(self.prompt_logprobs) + 1 - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def block_table(self) -> NDArray[np.int64]:
        """`block_ids` as an array that stays as it is; made anew for other blocks only, as each step asks."""
        if self._tabled_ids is not self.block_ids or len(self._block_table) != len(self.block_ids):
            self._block_table, self._tabled_ids = np.asarray(self.block_ids, dtype=np.int64), self.block_ids
        return self._block_table

    def pending_token_ids(self, num_tokens: int) -> list[int]:
        """The next `num_tokens` tokens to compute."""
        return self.token_ids(self.num_computed_tokens, self.num_computed_tokens + num_tokens)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer at positions `start` to `end`, the latter not included."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - num_prompt)]

    def append_token(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Takes a sampled token and decides whether it is the last one (`finish_reason`)."""
        self.output_token_ids.append(token_id)
        if logprobs is not None:
            self.output_logprobs.append(logprobs)
        if self.guide is not None:
            self.guide.accept(token_id)
        if self.guide is not None and self.guide.failure is not None:
            self.finish_reason, self.stop_reason = "abort", self.guide.failure
        elif not self.params.ignore_eos and token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif token_id in (self.params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self._has_stop_string(token_id):
            self.finish_reason = "stop"
        elif self.num_tokens >= self.max_total_tokens:
            self.finish_reason = "length"

    def _has_stop_string(self, token_id: int) -> bool:
        if self.detokenizer is None or not self.params.stop_strings:
            return False
        new_text = self.detokenizer.append([token_id])
        hit = find_stop(self.detokenizer.text, len(new_text), self.params.stop_strings)
        if hit is None:
            return False
        self._text_end, self.stop_reason = hit
        return True

    def _final_text(self) -> str:
        if self.detokenizer is None:
            return ""
        if self._text_end is not None:
            return self.detokenizer.text[: self._text_end]
        # Stopped, but by no string: by its last token, which is not part of the text.
        shown = self.output_token_ids[:-1] if self.finish_reason == "stop" else self.output_token_ids
        if not self.params.stop_strings:
            self.detokenizer.append(shown)
        self.detokenizer.finish()
        return self.detokenizer.text

    def output(self) -> RequestOutput:
        """What the caller gets. Only once, and only after the request has finished."""
        assert self.is_finished, f"request {self.request_id} is {self.status.value}"
        completion = CompletionOutput(
            index=self.index,
            text=self._final_text(),
            token_ids=list(self.output_token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else list(self.output_logprobs),
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[completion],
            finished=True,
            num_cached_tokens=self.num_cached_tokens or 0,
            prompt_logprobs=None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs],
        )
