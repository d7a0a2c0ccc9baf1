"""What code is told that asks torch about the capture around it, so that all runs of a function take the same path.

- Attention and transformer layers of `torch.nn` have fast paths (`torch.backends.mha`), and first ask
  `torch.overrides.has_torch_function`, which says yes under any function mode. One that only looks on must not change
  what runs: the graph would hold other operators than the call.
- Libraries leave out host reads while a stream is captured, and ask `torch.cuda.is_current_stream_capturing`. A run
  that stands for the capture, on the CPU device the capture itself, has to be told yes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_has_torch_function = torch.overrides.has_torch_function
_none = torch._C._disabled_torch_function_impl
is_capturing = torch.cuda.is_current_stream_capturing
"""The truth, whatever others are told."""


class _Patch:
    """A function of a module that has another in its place while somebody needs it, in whatever thread."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., bool]) -> None:
        self._owner, self._name = owner, name
        self._original, self._replacement = getattr(owner, name), replacement
        self._lock = threading.Lock()
        self._num_users = 0

    def __enter__(self) -> None:
        with self._lock:
            self._num_users += 1
            setattr(self._owner, self._name, self._replacement)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                setattr(self._owner, self._name, self._original)


class OnlyLooks(TorchFunctionMode):
    """A function mode that changes nothing, and is no reason against a fast path."""

    def __enter__(self) -> Any:
        _overrides.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _overrides.__exit__()


def _has_other_override(args: Iterable[Any]) -> bool:
    if torch.compiler.is_compiling():
        return bool(_has_torch_function(args))
    modes = _get_current_function_mode_stack()
    if modes and all(isinstance(mode, OnlyLooks) for mode in modes):
        return any(map(_has_its_own, args))
    return bool(_has_torch_function(args))


def _has_its_own(value: Any) -> bool:
    """What torch asks of an argument without a mode."""
    return type(value) is not torch.Tensor and getattr(type(value), "__torch_function__", _none) is not _none


class _Told(threading.local):
    is_capturing = False
    breaks = True


_told = _Told()


@contextmanager
def as_if_capturing(*, breaks: bool) -> Iterator[None]:
    """In this thread.

    Args:
        breaks: Whether marked calls are breaks: a replay runs them as Python, so they are told the truth.
    """
    with _telling(True, breaks):
        yield


def the_truth() -> AbstractContextManager[None]:
    """For what a replay runs as Python."""
    return _telling(False, True) if _told.is_capturing else nullcontext()


def are_breaks_told_otherwise() -> bool:
    """Whether a marked call has to ask for the truth, if it is a break."""
    return _told.is_capturing and _told.breaks


@contextmanager
def _telling(is_capturing: bool, breaks: bool) -> Iterator[None]:
    before = _told.is_capturing, _told.breaks
    _told.is_capturing, _told.breaks = is_capturing, breaks
    try:
        with _capturing:
            yield
    finally:
        _told.is_capturing, _told.breaks = before


_overrides = _Patch(torch.overrides, "has_torch_function", _has_other_override)
_capturing = _Patch(torch.cuda, "is_current_stream_capturing", lambda: _told.is_capturing or is_capturing())
