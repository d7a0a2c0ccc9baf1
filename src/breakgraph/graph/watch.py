"""Looking on at the breaks of a forward: what goes into each marked call, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from breakgraph.errors import CaptureError
from breakgraph.graph.eager_break import BreakSpec, active, run_break, run_plain
from breakgraph.graph.tree import Tree, tree_leaves


class BreakWatcher:
    """Told of every outermost break, eager (:func:`watch_eager`) or replayed (:meth:`PlanFamily.watching`).

    The tensors are the break's own: clone what is to be kept. By itself it does nothing.
    """

    def before(self, spec: BreakSpec, tensors: Sequence[torch.Tensor], mutated: Sequence[torch.Tensor]) -> None:
        """A break is about to run on ``tensors``; those that it may write are ``mutated``."""

    def after(self, spec: BreakSpec, mutated: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """It has run; ``results`` are the fresh tensors that it returned."""


class _EagerWatch:
    """Takes the marked calls of a forward that runs as plain Python."""

    def __init__(self, watcher: BreakWatcher, breaks: bool) -> None:
        self._watcher = watcher
        self._breaks = breaks
        self._in_break = False

    @property
    def is_recording(self) -> bool:
        return not self._in_break

    def constant(self, value: Any, read: Callable[[], Any]) -> Any:
        return read()

    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        return call()

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        return call(*args)

    def call_break(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tree:  # fmt: skip
        if not (self._breaks or spec.always) or self._in_break:
            return run_plain(spec, fn, args, kwargs)
        given = spec.signature.bind(*args, **kwargs).arguments
        mutated = spec.mutated(args, kwargs)
        self._watcher.before(spec, _tensors_in(list(given.values())), mutated)
        self._in_break = True
        try:
            result = run_break(spec, fn, args, kwargs)
        finally:
            self._in_break = False
        written = {_place(t) for t in mutated}
        fresh = {_place(t): t for t in _tensors_in(result) if _place(t) not in written}
        self._watcher.after(spec, mutated, list(fresh.values()))
        return result


@contextmanager
def watch_eager(watcher: BreakWatcher, *, breaks: bool = True) -> Iterator[None]:
    """Show ``watcher`` every break of what this thread runs inside, without a capture.

    Args:
        breaks: False when marked calls are part of the graph: then there is nothing to show.

    Raises:
        CaptureError: this thread is capturing.
    """
    if active.builder is not None:
        raise CaptureError("this thread is capturing; look on at an eager run before the capture or after it")
    active.builder = _EagerWatch(watcher, breaks)
    try:
        yield
    finally:
        active.builder = None


def _tensors_in(tree: Tree) -> list[torch.Tensor]:
    return [leaf for _, leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
