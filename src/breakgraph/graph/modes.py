"""The state of the process and thread that a capture depends on: garbage collection, grad and autocast modes,
defaults of dtype and device, attention kernels."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._device import DeviceContext

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
    """What torch was told by contexts around a capture, or a break: every replay and break runs under the same.

    Attributes:
        default_dtype: Of the whole process, as `attention` is. None, of both: whatever is in force. To set them around
            a replay would reach into what other threads do; so they are set around breaks only for which the captured
            code had done so.
        default_device: Of `torch.set_default_device` or `with torch.device(...)`; None where nobody set one.
        attention: See :func:`_attention`.
    """

    grad: bool
    inference: bool
    autocast_dtype: torch.dtype | None
    default_dtype: torch.dtype | None
    default_device: torch.device | None
    attention: tuple[Any, ...] | None
    device_type: str

    @classmethod
    def current(cls, device_type: str) -> ExecMode:
        """The modes in force now."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast_dtype=torch.get_autocast_dtype(device_type) if enabled else None,
            default_dtype=torch.get_default_dtype(),
            default_device=_default_device(),
            attention=_attention(),
            device_type=device_type,
        )

    def of_thread(self) -> ExecMode:
        """Without what is the process's."""
        return replace(self, default_dtype=None, attention=None)

    def around_break(self, captured: ExecMode) -> ExecMode | None:
        """What a break is run under that was reached in these modes; None where they are those of the capture."""
        if self == captured:
            return None
        dtype = None if self.default_dtype == captured.default_dtype else self.default_dtype
        attention = None if self.attention == captured.attention else self.attention
        return replace(self, default_dtype=dtype, attention=attention)

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
        if self.default_dtype is not None and (dtype := torch.get_default_dtype()) != self.default_dtype:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(self.default_dtype)
        if self.attention is not None and (attention := _attention()) != self.attention:
            stack.callback(_set_attention, attention)
            _set_attention(self.attention)
        if _default_device() != self.default_device:
            stack.enter_context(self.default_device or torch.device("cpu"))
        return stack


def _default_device() -> torch.device | None:
    """Of this thread: that of the innermost mode which stands for one."""
    depth = torch._C._len_torch_function_stack()
    if not depth:
        return None
    for place in range(depth - 1, -1, -1):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


_KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_may_use = [getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _KERNELS]
_set_use = [getattr(torch._C, f"_set_sdp_use_{name}") for name in _KERNELS]


def _attention() -> tuple[Any, ...]:
    """Which kernels `scaled_dot_product_attention` may use, and which it tries first: `sdpa_kernel()` sets both."""
    return (*[may_use() for may_use in _may_use], tuple(torch._C._get_sdp_priority_order()))


def _set_attention(attention: tuple[Any, ...]) -> None:
    *used, order = attention
    for set_use, is_used in zip(_set_use, used, strict=True):
        set_use(is_used)
    torch._C._set_sdp_priority_order(list(order))
