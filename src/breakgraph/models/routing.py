"""Who wants to know where a mixture's experts are sent tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

RoutingWatcher = Callable[[torch.Tensor, int], None]
"""Called with each layer's choice, expert indices [live tokens, k], and its number of experts."""
_watchers: list[RoutingWatcher] = []


@contextmanager
def watch_routing(watcher: RoutingWatcher) -> Iterator[None]:
    """Show where our implementations of experts are sent tokens while the forward runs, compiled or not. On a GPU
    replays show nothing, and captures must not be watched."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def show_routing(top_k_index: torch.Tensor, num_experts: int, num_live: torch.Tensor | None) -> None:
    """Tell the watchers, if there are any. Not for code that is traced."""
    for watcher in _watchers:
        watcher(top_k_index if num_live is None else top_k_index[: int(num_live)], num_experts)
