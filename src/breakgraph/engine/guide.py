"""What the engine asks of whatever keeps an answer to its form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

NO_TOKEN_FITS = "the vocabulary has no token with which the answer keeps to its form"
"""Why a guided answer was given up."""

_PATIENCE_SEC = 0.005
_IDLE_SEC = 0.05


class Guide(Protocol):
    """Where one answer is in its grammar.

    Attributes:
        failure: why the answer can only be given up; None while all is well.
    """

    failure: str | None

    def allowed(self) -> Tensor | None:
        """The tokens that may come next, as bits of int32 [ceil(V / 32)], the first of a word in its lowest bit.

        None while they are still being found. Stop tokens are among them where the answer may end; and after a failure,
        so that something can be drawn.
        """

    def wait(self, timeout_sec: float) -> None:
        """Until `allowed` knows, or the time is over."""

    def accept(self, token_id: int) -> None:
        """Goes on by a token that was allowed."""


class Grammar(Protocol):
    """A compiled grammar; any number of answers at a time may be guided by it."""

    def guide(self) -> Guide:
        """At the beginning of an answer."""


def stop_mask(stop_token_ids: Iterable[int], num_words: int) -> Tensor:
    """Stop tokens alone, as bits of int32 [num_words]."""
    bits_W = torch.zeros(num_words, dtype=torch.int32)
    for token_id in stop_token_ids:
        # The sign of a word is its highest bit.
        bits_W[token_id // 32] |= torch.tensor(1 << token_id % 32).to(torch.int32)
    return bits_W


def known_masks(guides: Mapping[int, Guide], *, others_go_on: bool) -> dict[int, Tensor]:
    """What `allowed` says, by the same keys, without those that do not know it.

    They are waited for: as long as nobody minds if other answers have no need to, and never so long that requests
    could not come and go.
    """
    masks = {i: bits for i, guide in guides.items() if (bits := guide.allowed()) is not None}
    until = time.monotonic() + (_PATIENCE_SEC if others_go_on or masks else _IDLE_SEC)
    for i, guide in guides.items():
        if i not in masks:
            guide.wait(max(0.0, until - time.monotonic()))
            if (bits := guide.allowed()) is not None:
                masks[i] = bits
    return masks
