"""Text from token ids, a token at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NUM_CONTEXT_TOKENS = 6
"""Prompt tokens decoded along with the answer, so that its first token keeps its leading space."""

MAX_PENDING_TOKENS = 32
"""So many tokens without text (special ones, mostly) are kept for what follows them."""

MAX_UNFINISHED = 3
"""A UTF-8 character has 4 bytes at most, so 3 tokens can wait for the last byte; what waits longer is invalid."""

_MAX_AT_ONCE = 64
"""Tokens decoded at once when many are appended: one broken byte among them has them decoded one by one."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What the engine needs of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class Detokenizer:
    """Text of one request's answer so far.

    `text` only grows. What may still change (bytes of an unfinished character at the end) is held back until
    `finish()`. Only a short window of tokens is decoded for each new one: a context of whole characters, and the
    tokens after it.

    A byte-fallback decoder turns a whole run of byte tokens into replacement characters if one of them is broken. Here
    the characters beside a broken byte stay: it is left out of the window as soon as no character can come of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        """Tokens read last; they end with a whole character."""
        self._context_text = ""
        self._pending: list[int] = []
        """Tokens after the context."""
        self._num_read_chars = 0
        """Characters of the pending tokens that `text` has."""
        self._num_hidden = 0
        """Replacement characters of the prompt's own last bytes, unless the answer makes a character of them."""
        self.text = ""
        # A context cut within a character begins with broken bytes, and is put right as those of an answer are.
        self.append(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_hidden = self._added(self._pending).count(_REPLACEMENT)
        self.text = ""

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the text that they settled, possibly empty."""
        start = len(self.text)
        for first in range(0, len(token_ids), _MAX_AT_ONCE):
            tokens = list(token_ids[first : first + _MAX_AT_ONCE])
            if len(tokens) > 1 and self._append_whole(tokens):
                continue
            for token_id in tokens:
                self._append_one(token_id)
        return self.text[start:]

    def finish(self) -> str:
        """Gives out what was held back, as replacement characters, and returns it."""
        start = len(self.text)
        self._give(self._added(self._pending))
        self._pending, self._num_read_chars = [], 0
        return self.text[start:]

    def _append_whole(self, token_ids: list[int]) -> bool:
        """Takes tokens that end with a whole character and have no broken byte; others it leaves alone."""
        pending = self._pending + token_ids
        text = self._decode(self._context + pending)
        if _REPLACEMENT in text or not self._is_whole(text):
            return False
        self._give(text[len(self._context_text) + self._num_read_chars :])
        self._slide(pending)
        return True

    def _append_one(self, token_id: int) -> None:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text == self._context_text:
            # Special tokens alone have no text; they would be no context for what follows.
            del self._pending[:-MAX_PENDING_TOKENS]
        elif self._is_whole(text):
            self._settle(text)
        elif self._drop_broken():
            return
        elif text.endswith(_REPLACEMENT):
            self._hold_back(text)
        else:
            # A decoder that changes what it said of the context.
            self._settle(text)

    def _settle(self, text: str) -> None:
        """Gives out all of the window's `text` that has not been given out."""
        self._give(text[len(self._context_text) + self._num_read_chars :])
        self._slide(self._pending)

    def _is_whole(self, text: str) -> bool:
        """Whether `text` of the window keeps the context's, adds to it, and does not end within a character."""
        return (
            len(text) > len(self._context_text)
            and text.startswith(self._context_text)
            and not text.endswith(_REPLACEMENT)
        )

    def _drop_broken(self) -> bool:
        """Whether the last pending tokens are whole without those before them, which then can only be broken."""
        for first in range(1, len(self._pending)):
            tail = self._pending[first:]
            text = self._decode(self._context + tail)
            if self._is_whole(text):
                self._give(self._added(self._pending[:first]) + text[len(self._context_text) :])
                self._slide(tail)
                return True
        return False

    def _hold_back(self, text: str) -> None:
        """Gives out `text` up to the replacements at its end, and of them those that can no longer change."""
        start = len(self._context_text)
        settled = text.rstrip(_REPLACEMENT)
        new_text = settled[start + self._num_read_chars :]
        self._give(new_text)
        self._num_read_chars += len(new_text)
        while len(self._pending) > MAX_UNFINISHED and self._num_with_text() > MAX_UNFINISHED:
            del self._pending[0]
            shorter = self._decode(self._context + self._pending)
            # Fewer than none if the rest of one broken character is now several: one of those counts as read.
            num_dropped = len(text) - len(shorter)
            self._give(text[start + self._num_read_chars : start + max(num_dropped, 0)])
            self._num_read_chars = max(self._num_read_chars - num_dropped, 0)
            text = shorter
        del self._pending[:-MAX_PENDING_TOKENS]

    def _num_with_text(self) -> int:
        return sum(self._decode([token_id]) != "" for token_id in self._pending)

    def _added(self, token_ids: list[int]) -> str:
        """What `token_ids`, the first of the pending ones, add to the text, whole or not."""
        text = self._decode(self._context + token_ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) + self._num_read_chars :]
        # Their broken bytes are in one run with the context's.
        return self._decode(token_ids)

    def _give(self, text: str) -> None:
        """Adds to `text`, less the replacement characters that are the prompt's."""
        if self._num_hidden and text:
            num_replacements = len(text) - len(text.lstrip(_REPLACEMENT))
            text = text[min(self._num_hidden, num_replacements) :]
            self._num_hidden = 0 if text else self._num_hidden - num_replacements
        self.text += text

    def _slide(self, tokens: list[int]) -> None:
        """Keeps the tokens read last as the context of the next ones: some decoders look at what stands before."""
        self._context, self._context_text = tokens, self._decode(tokens)
        self._pending, self._num_read_chars = [], 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_stop(text: str, num_new_chars: int, stop_strings: Sequence[str]) -> tuple[int, str] | None:
    """(where, which) of the earliest stop string that ends in the last `num_new_chars` of `text`."""
    found = []
    for stop in stop_strings:
        at = text.find(stop, max(0, len(text) - num_new_chars - len(stop) + 1))
        if at >= 0:
            found.append((at, stop))
    return min(found, key=lambda hit: hit[0], default=None)
