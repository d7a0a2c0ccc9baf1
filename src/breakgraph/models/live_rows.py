"""The number of live rows, for code that may be traced: a trace must not look it up, or it would keep the tensor of the
step that it was made in. There it is an attribute, which Dynamo makes an input of its graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from breakgraph.attention import live_token_count


class _Given(threading.local):
    def __init__(self) -> None:
        # Not of the class: Dynamo would find that one, whatever the thread has set.
        self.count: torch.Tensor | None = None


_given = _Given()


@contextmanager
def give_live_count(count: torch.Tensor | None) -> Iterator[None]:
    """Let traced code on this thread find `count`, what `live_token_count` says of the step."""
    before = _given.count
    _given.count = count
    try:
        yield
    finally:
        _given.count = before


def live_count(num_rows: int) -> torch.Tensor | None:
    """As `live_token_count`; in traced code what :func:`give_live_count` gives to the call, or None."""
    return _given.count if torch.compiler.is_dynamo_compiling() else live_token_count(num_rows)
