"""The ways of writing a prompt, brought to one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, SupportsIndex

from breakgraph.errors import ConfigError, PromptError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as token ids, with its text where it came as one."""

    token_ids: list[int]
    text: str | None = None


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several. A flat list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts must be text, token ids, a dict, or a list of them, got {type(prompts).__name__}")
    if prompts and _are_ints(prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def tokenize(prompt: Prompt, encode: Callable[[str], list[int]]) -> TokenPrompt:
    """Raises PromptError for a prompt of another type; whatever `encode` raises comes through."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise PromptError(f"a prompt dict has 'prompt' or 'prompt_token_ids' and nothing else, got {list(prompt)}")
        key, prompt = next(iter(prompt.items()))
        if isinstance(prompt, str) is not (key == "prompt"):
            raise PromptError(f"{key!r} must be {'text' if key == 'prompt' else 'a list of token ids'}, got {prompt!r}")
    if isinstance(prompt, str):
        return TokenPrompt(encode(prompt), prompt)
    if isinstance(prompt, Sequence) and _are_ints(prompt):
        return TokenPrompt(list(map(operator.index, prompt)))  # type: ignore[arg-type]
    raise PromptError(f"a prompt must be text, a list of token ids, or a dict with either, got {prompt!r:.200}")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt, with what the tokenizer puts before every text. Raises PromptError: it is no text."""
    _check_unicode(text)
    return list(tokenizer(text).input_ids)


def apply_chat_template(tokenizer: Any, conversation: Sequence[Mapping[str, Any]], model: str) -> TokenPrompt:
    """The prompt for the next message of a conversation.

    Raises ConfigError when `model` has no chat template, PromptError for what is no conversation.
    """
    if not conversation or isinstance(conversation, str | Mapping) or not all(
        isinstance(message, Mapping) and "role" in message for message in conversation
    ):  # fmt: skip
        raise PromptError(f"a conversation is a list of messages, dicts with 'role', got {conversation!r:.200}")
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {model} has no chat template; use generate with a whole prompt")
    text = tokenizer.apply_chat_template(list(conversation), tokenize=False, add_generation_prompt=True)
    _check_unicode(text)
    # The template writes the special tokens itself.
    return TokenPrompt(list(tokenizer(text, add_special_tokens=False).input_ids), text)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{error.object[error.start]!r} at {error.start}"
        raise PromptError(f"the prompt is not valid Unicode: {what}; bytes that are not UTF-8 come in so") from None


def _are_ints(values: Sequence[object]) -> bool:
    """By type, of which there are few. Arrays of one element have an index too."""
    kinds = set(map(type, values))
    return all(issubclass(kind, SupportsIndex) and not issubclass(kind, bool | Sized) for kind in kinds)
