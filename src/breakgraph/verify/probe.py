"""Taking a segment apart: a break after every operator, so that a replay shows its values one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from breakgraph.graph import Device, EagerBreak
from breakgraph.graph.eager_break import BreakHandler, BreakSpec, active
from breakgraph.graph.effects import allocates_only, reads_and_writes, tensors_in
from breakgraph.graph.refusals import applies_functions, source_line
from breakgraph.graph.tree import Tree
from breakgraph.verify.log import ValueLog

_OWN_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class OpCall:
    """One operator of the segment: what, called by which module, on which line."""

    op: str
    module: str | None
    source: str


class Probe:
    """Wraps a forward so that each operator of one segment leaves its results in ``log``.

    In a capture each is followed by a break, which also runs at every replay. In a warm-up nothing happens.
    """

    def __init__(self, segment: int, breaks: bool, device: Device) -> None:
        self.log = ValueLog()
        self.calls: list[OpCall] = []
        self._segment = segment
        self._breaks = breaks
        self._device = device
        self._modules: list[torch.nn.Module] = []
        self._show = EagerBreak(self._note, name="probe", always=True)

    def wrap(self, forward: Callable[[], Tree]) -> Callable[[], Tree]:
        """The probed forward; it looks at what happens inside a capture or ``watch_eager``."""

        def probed() -> Tree:
            handler = active.builder
            if handler is None:
                return forward()
            counting = _Counting(handler, self._breaks)
            active.builder = counting
            self.calls = []
            try:
                with self._module_stack(), _EachOp(self, counting):
                    return forward()
            finally:
                active.builder = handler

        return probed

    def is_wanted(self, handler: _Counting) -> bool:
        """Whether what runs now is part of the segment."""
        return handler.num_breaks == self._segment and handler.is_recording

    def saw(self, func: torch._ops.OpOverload, tensors: Sequence[Tensor]) -> None:
        """An operator has run, or was recorded, and these are what it wrote."""
        shown = tuple(t for t in tensors if not self._is_host(t))
        if shown:
            self.calls.append(OpCall(str(func), self._path(), source_line(_OWN_FOLDER)))
            self._show(len(self.calls) - 1, shown)

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.device != self._device.torch_device or self._device.is_transient_host(tensor)

    def _note(self, index: int, tensors: tuple[Tensor, ...]) -> None:
        with _disable_current_modes():
            self.log.add(index, tensors)

    @contextmanager
    def _module_stack(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            self._modules.append(module)

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._modules.clear()

    def _path(self) -> str | None:
        """Class of the outermost module, then the names of the others below each other."""
        if not self._modules:
            return None
        parts = [type(self._modules[0]).__name__]
        for parent, child in zip(self._modules, self._modules[1:], strict=False):
            parts.append(next((name for name, m in parent.named_modules() if m is child), type(child).__name__))
        return ".".join(parts)


class _Counting:
    """In front of the thread's capture, or of who looks on: counts the breaks of the forward itself."""

    def __init__(self, handler: BreakHandler, breaks: bool) -> None:
        self.num_breaks = 0
        self._handler = handler
        self._breaks = breaks
        self._in_call = False

    @property
    def is_recording(self) -> bool:
        return self._handler.is_recording and not self._in_call

    def constant(self, value: Any, read: Callable[[], Any]) -> Any:
        return self._handler.constant(value, read)

    def unwatched(self, call: Callable[[], Any], reads: Iterable[Tensor]) -> Any:
        return self._handler.unwatched(call, reads)

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        return self._handler.compiled(call, args)

    def call_break(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tree:  # fmt: skip
        if not self._breaks or not self.is_recording:
            return self._handler.call_break(spec, fn, args, kwargs)
        self._in_call = True  # segments are closed and boundaries filled there: no operators of the forward
        try:
            result = self._handler.call_break(spec, fn, args, kwargs)
        finally:
            self._in_call = False
        self.num_breaks += not spec.always
        return result


class _EachOp(TorchDispatchMode):
    """Tells the probe of every operator that computes something."""

    supports_higher_order_operators = True

    def __init__(self, probe: Probe, handler: _Counting) -> None:
        super().__init__()
        self._probe = probe
        self._handler = handler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if applies_functions(func) or func.is_view or allocates_only(func) or not self._probe.is_wanted(self._handler):
            return out
        _, written = reads_and_writes(func, args, kwargs)
        made = {id(t): t for t in (*tensors_in(out), *written)}
        self._probe.saw(func, list(made.values()))
        return out
