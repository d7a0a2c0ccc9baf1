"""The text of one answer while it grows: what may be shown of it, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from breakgraph.engine.detokenizer import Detokenizer, Tokenizer, find_stop


class AnswerText:
    """Text that is given out in pieces, each of them final.

    Held back is what a later token may change or take away: bytes of an unfinished character, and an end that a stop
    string begins with.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._num_shown = 0
        self.stop_reason: str | None = None
        """The stop string that ended the text; nothing is added after it."""

    @property
    def shown(self) -> str:
        """Everything given out so far."""
        return self._detokenizer.text[: self._num_shown]

    def append(self, token_id: int) -> str:
        """Takes a token and returns the text that can be shown now, possibly empty."""
        if self.stop_reason is not None:
            return ""
        new_text = self._detokenizer.append([token_id])
        text = self._detokenizer.text
        hit = find_stop(text, len(new_text), self._stop_strings)
        if hit is not None:
            end, self.stop_reason = hit
        else:
            end = len(text) - max((_begun(text, stop) for stop in self._stop_strings), default=0)
        return self._show(end)

    def finish(self) -> str:
        """Gives out what was held back, unless a stop string ended the text, and returns it."""
        if self.stop_reason is not None:
            return ""
        self._detokenizer.finish()
        return self._show(len(self._detokenizer.text))

    def _show(self, end: int) -> str:
        start, self._num_shown = self._num_shown, max(self._num_shown, end)
        return self._detokenizer.text[start:end]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
