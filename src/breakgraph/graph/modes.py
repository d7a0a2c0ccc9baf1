"""The state of the process and thread that a capture depends on: garbage collection, grad and autocast modes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

_open_windows = 0
_was_enabled = True


@contextmanager
def capture_window() -> Iterator[None]:
    """Collect garbage once, then keep the collector off: a graph destroyed by it would invalidate an open capture.

    Re-entrant: the first window to open collects, so that capturing many buckets costs one collection; the last one to
    close puts the collector back.
    """
    global _open_windows, _was_enabled
    if _open_windows == 0:
        _was_enabled = gc.isenabled()
        gc.collect()
    gc.disable()
    _open_windows += 1
    try:
        yield
    finally:
        _open_windows -= 1
        if _open_windows == 0 and _was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class ExecMode:
    """Grad, inference and autocast modes of the thread that captured; every replay and break runs under them."""

    grad: bool
    inference: bool
    autocast_dtype: torch.dtype | None
    device_type: str

    @classmethod
    def current(cls, device_type: str) -> ExecMode:
        """The modes in force now."""
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if enabled else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype, device_type)

    def apply(self) -> AbstractContextManager[object]:
        """Enter the modes; a no-op when they are already in force."""
        stack = ExitStack()
        if torch.is_inference_mode_enabled() != self.inference:
            stack.enter_context(torch.inference_mode(self.inference))
        if torch.is_grad_enabled() != self.grad:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        enabled = torch.is_autocast_enabled(self.device_type)
        if enabled != (self.autocast_dtype is not None) or self.autocast_dtype is not None:
            # The weight cache would hold pool tensors across segments.
            stack.enter_context(
                torch.autocast(
                    self.device_type,
                    dtype=self.autocast_dtype,
                    enabled=self.autocast_dtype is not None,
                    cache_enabled=False,
                )
            )
        return stack
