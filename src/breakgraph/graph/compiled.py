"""Calls of code that ``torch.compile`` made, inside captures.

Dynamo looks at the modes of the thread before it uses what it has compiled, and kernels that Inductor wrote never pass
the dispatcher. So the modes of a capture step aside for such a call, and the capture is told what it reads. Where other
modes watch each operator, the code runs as if it had not been compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from breakgraph.graph.eager_break import active
from breakgraph.graph.tracing import BREAKS


def run_compiled(
    fn: Callable[..., Any], reads: Callable[[], Iterable[torch.Tensor]], args: Any = (), kwargs: Any = None
) -> Any:
    """Call ``fn(*args, **kwargs)``, which ``torch.compile`` made.

    In a capture its kernels go into the segment; marked calls in it are breaks as anywhere. What the operators in
    between do is not checked there: verify the plan.

    Args:
        reads: The tensors outside its arguments that it reads, parameters above all; asked for only in a capture. The
            plan keeps them alive.
    """
    builder = active.builder
    if builder is None or not builder.is_recording:
        # Dynamo would skip the code, and go on to skip it when nobody watches any longer.
        is_watched = is_in_torch_dispatch_mode(include_infra_modes=False)
        with torch.compiler.set_stance("force_eager") if is_watched else nullcontext():
            return fn(*args, **(kwargs or {}))
    return builder.unwatched(lambda: fn(*args, **(kwargs or {})), reads())


def run_piece(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call ``fn(*args)``, code of a compiler that reads nothing but its arguments and holds no marked calls."""
    builder = active.builder
    return fn(*args) if builder is None or not builder.is_recording else builder.compiled(fn, args)


def hide_breaks() -> None:
    """Make Dynamo leave marked calls alone: it compiles what lies before them and what lies behind them."""
    BREAKS.hide()


@contextmanager
def without_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Take one function mode off the thread's stack for a while; those above it stay, and may change meanwhile."""
    stack = _get_current_function_mode_stack()
    index = next((i for i, other in enumerate(stack) if other is mode), None)
    if index is None:
        yield
        return
    _replace_top(stack[index:], stack[index + 1 :])
    try:
        yield
    finally:
        above = _get_current_function_mode_stack()[index:]
        _replace_top(above, [mode, *above])


def _replace_top(old: list[TorchFunctionMode], new: list[TorchFunctionMode]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
