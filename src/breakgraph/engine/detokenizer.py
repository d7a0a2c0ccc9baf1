"""Text from token ids, a token at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NUM_CONTEXT_TOKENS = 6
"""Prompt tokens decoded along with the answer, so that its first token keeps its leading space."""

MAX_PENDING_TOKENS = 32
"""After so many tokens without a whole character the bytes are taken to be invalid, not unfinished."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED = 3
"""A UTF-8 character has 4 bytes at most, so 3 of them can wait for the last; each may decode to a replacement."""


class Tokenizer(Protocol):
    """What the engine needs of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class Detokenizer:
    """Text of one request's answer so far.

    `text` only grows. What may still change (bytes of an unfinished character at the end) is held back until
    `finish()`. Only a short window of tokens is decoded for each new one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_read_tokens = len(self._window)
        """Tokens of the window whose text is complete."""
        self._num_read_chars = len(_settled(self._decode(self._window)))
        """Characters of the window's text that `text` has, or that belong to the prompt."""
        self.text = ""

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the text that they settled, possibly empty."""
        self._window.extend(token_ids)
        window_text = self._decode(self._window)
        is_stuck = len(self._window) - self._num_read_tokens > MAX_PENDING_TOKENS
        settled = window_text if is_stuck else _settled(window_text)
        new_text = settled[self._num_read_chars :]
        self.text += new_text
        self._num_read_chars = max(self._num_read_chars, len(settled))
        # Special tokens alone have no text; they would be no context for what follows.
        if is_stuck or (new_text and len(settled) == len(window_text)):
            self._slide()
        return new_text

    def finish(self) -> str:
        """Gives out what was held back, as replacement characters, and returns it."""
        rest = self._decode(self._window)[self._num_read_chars :]
        self.text += rest
        self._num_read_chars += len(rest)
        return rest

    def _slide(self) -> None:
        """Keeps the tokens read last as the context of the next ones: some decoders look at what stands before."""
        self._window = self._window[self._num_read_tokens :]
        self._num_read_tokens = len(self._window)
        self._num_read_chars = len(self._decode(self._window))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _settled(text: str) -> str:
    """`text` without the replacement characters at its end that may yet become a character."""
    end = len(text)
    while end > 0 and len(text) - end < _MAX_UNFINISHED and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


def find_stop(text: str, num_new_chars: int, stop_strings: Sequence[str]) -> tuple[int, str] | None:
    """(where, which) of the earliest stop string that ends in the last `num_new_chars` of `text`."""
    found = []
    for stop in stop_strings:
        at = text.find(stop, max(0, len(text) - num_new_chars - len(stop) + 1))
        if at >= 0:
            found.append((at, stop))
    return min(found, key=lambda hit: hit[0], default=None)
