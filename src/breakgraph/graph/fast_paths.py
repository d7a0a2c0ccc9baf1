"""Fast paths of torch's own layers (`torch.backends.mha`): a capture takes them where a call outside it does.

Attention and transformer layers of `torch.nn` first ask `torch.overrides.has_torch_function`, which says yes under any
function mode. One that only looks on must not change what runs: the graph would hold other operators than the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_has_torch_function = torch.overrides.has_torch_function
_none = torch._C._disabled_torch_function_impl
_lock = threading.Lock()
_num_open = 0


@contextmanager
def looking_on(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """While modes of ``kind`` are entered and left, in any thread: they do not count."""
    global _num_open

    def has_torch_function(args: Iterable[Any]) -> bool:
        if torch.compiler.is_compiling():
            return bool(_has_torch_function(args))
        modes = _get_current_function_mode_stack()
        if modes and all(isinstance(mode, kind) for mode in modes):
            return any(map(_has_its_own, args))
        return bool(_has_torch_function(args))

    with _lock:
        _num_open += 1
        torch.overrides.has_torch_function = has_torch_function
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if _num_open == 0:
                torch.overrides.has_torch_function = _has_torch_function


def _has_its_own(value: Any) -> bool:
    """What torch asks of an argument without a mode."""
    return type(value) is not torch.Tensor and getattr(type(value), "__torch_function__", _none) is not _none
