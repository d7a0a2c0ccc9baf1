"""How answers look in the two kinds of completion, whole and in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from breakgraph.engine.sampler import TokenLogprobs
from breakgraph.server.generation import Delta
from breakgraph.server.responses import ChatLogprobs, CompletionLogprobs, TopLogprob
from breakgraph.server.token_text import token_bytes, token_text

_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


class Form(Protocol):
    """One of the two APIs. Choices are dicts for JSON."""

    id_prefix: str
    whole_object: str
    part_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first part of a streamed answer, before anything is generated."""

    def part(self, delta: Delta) -> dict[str, Any]:
        """What is new of a streamed answer."""

    def whole(self, answer: Delta) -> dict[str, Any]:
        """A complete answer."""


@dataclass(frozen=True)
class Echo:
    """A prompt that its answer begins with."""

    text: str
    token_ids: Sequence[int]


class CompletionForm:
    """`echoed` are the prompts that answers begin with, one an answer; empty without echo.

    With log probabilities, those of the prompt come in the same part as its text.
    """

    id_prefix = "cmpl-"
    whole_object = part_object = "text_completion"

    def __init__(self, tokenizer: Any, echoed: Sequence[Echo], *, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._has_logprobs = has_logprobs
        self._offsets: dict[int, int] = {}
        self._without_text = frozenset(tokenizer.all_special_ids)

    def opening(self, index: int) -> dict[str, Any] | None:
        echoed = self._echoed[index].text if self._echoed and not self._has_logprobs else ""
        return self._choice(index, echoed, None, None) if echoed else None

    def part(self, delta: Delta) -> dict[str, Any]:
        echoed = self._echoed[delta.index].text if delta.prompt_tokens else ""
        return self._choice(delta.index, echoed + delta.text, self._logprobs(delta), delta.finish_reason)

    def whole(self, answer: Delta) -> dict[str, Any]:
        echoed = self._echoed[answer.index].text if self._echoed else ""
        return self._choice(answer.index, echoed + answer.text, self._logprobs(answer), answer.finish_reason)

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: CompletionLogprobs | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if delta.prompt_tokens:
            self._offsets[delta.index] = self._add_prompt(out, self._echoed[delta.index], delta.prompt_tokens)
        offset = self._offsets.get(delta.index, 0)
        for token in delta.tokens:
            text = self._add(out, token.token_id, token, offset)
            offset += 0 if token.token_id in self._without_text else len(text)
        self._offsets[delta.index] = offset
        return out

    def _add_prompt(self, out: CompletionLogprobs, echo: Echo, tokens: Sequence[TokenLogprobs | None]) -> int:
        """Returns where the prompt's text ends. Special tokens count where the text has them."""
        offset = 0
        for token_id, token in zip(echo.token_ids, tokens, strict=True):
            text = self._add(out, token_id, token, offset)
            if token_id not in self._without_text or echo.text.startswith(text, offset):
                offset += len(text)
        return len(echo.text)

    def _add(self, out: CompletionLogprobs, token_id: int, token: TokenLogprobs | None, offset: int) -> str:
        text = token_text(self._tokenizer, token_id)
        out["tokens"].append(text)
        out["token_logprobs"].append(None if token is None else _finite(token.logprob))
        out["top_logprobs"].append(None if token is None else self._top(token))
        out["text_offset"].append(offset)
        return text

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """By text. Of tokens with the same text the likeliest counts."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(token.top_token_ids, token.top_logprobs, strict=True):
            top.setdefault(token_text(self._tokenizer, token_id), _finite(logprob))
        return top


class ChatForm:
    """Messages of the assistant."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    part_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Any, *, has_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def whole(self, answer: Delta) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(token.token_id, token.logprob),
                    "top_logprobs": [
                        self._entry(*top) for top in zip(token.top_token_ids, token.top_logprobs, strict=True)
                    ],
                }
                for token in delta.tokens
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": _finite(logprob),
            "bytes": token_bytes(self._tokenizer, token_id),
        }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
