"""Marking calls that run as plain Python between segments, at capture and at every replay."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch

from breakgraph.errors import ConfigError, ForeignCaptureError, ResultMismatchError, UnknownNameError
from breakgraph.graph.live import has_live, resolved
from breakgraph.graph.pretence import are_breaks_told_otherwise, is_capturing, the_truth
from breakgraph.graph.tree import Tree, tree_leaves

if TYPE_CHECKING:
    from breakgraph.graph.warm_up import WarmUp


class BreakHandler(Protocol):
    """What takes the marked calls of a thread: a capture, or somebody who looks on while they run."""

    @property
    def is_recording(self) -> bool:
        """Whether what this thread does now is outside of every break."""

    def call_break(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tree:  # fmt: skip
        """Run a marked call and return its result."""

    def constant(self, value: Any, read: Callable[[], Any]) -> Any:
        """The host value of a declared constant; ``read`` reads it from the device."""

    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        """Run a call whose operators the dispatcher does not show, and which reads these tensors."""

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run compiled code that reads nothing but its arguments."""


class _ThreadState(threading.local):
    builder: BreakHandler | None = None
    warm_up: WarmUp | None = None


active = _ThreadState()
"""The capture of this thread, or the warm-up before it, if there is one. Set by the plan family, read by every marked
call."""


@dataclass(frozen=True, slots=True)
class BreakSpec:
    """What a marked call declares.

    Attributes:
        name: Qualified name, for reports and errors.
        mutates: Parameters written in place. They reach the next segment as themselves, without a copy.
        valid_rows: Number of live rows of the current step, or None when all rows are written.
        row_dim: The dimension that ``valid_rows`` counts along, in mutated arguments and in results that have it.
        signature: Of the function as it is called.
        always: Whether it is a break also in captures that record marked calls.
        reason: Why it was made a break, where nobody marked it.
        bind: See :class:`BoundBreak`.
    """

    name: str
    mutates: tuple[str, ...]
    valid_rows: Callable[[], int] | None
    row_dim: int
    signature: inspect.Signature
    always: bool = False
    reason: str = ""
    bind: Callable[..., Callable[[], Tree]] | None = None

    @property
    def has_variadic(self) -> bool:
        """Whether the function takes ``*args`` or ``**kwargs``."""
        return any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in self.signature.parameters.values())

    def positions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """What the positional arguments of a call are called. Raises TypeError for a call that does not fit."""
        self.signature.bind(*args, **kwargs)
        names: list[str] = []
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names += (f"{parameter.name}[{index}]" for index in range(len(args) - len(names)))
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                names.append(parameter.name)
        return names[: len(args)]

    def mutated(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that ``mutates`` names."""
        if not self.mutates:
            return []
        if self.has_variadic:
            given = self.signature.bind(*args, **kwargs).arguments
        else:
            given = dict(zip(self.signature.parameters, args, strict=False)) | dict(kwargs)
        return [
            leaf
            for name in self.mutates
            if name in given
            for _, leaf in tree_leaves(given[name])
            if isinstance(leaf, torch.Tensor)
        ]

    def define_tail(self, tensor: torch.Tensor, valid: int) -> None:
        """Zero the rows from ``valid`` on: what a varlen kernel leaves there may be NaN."""
        rows = self.check_rows(tensor, valid)
        if valid < rows:
            tensor.narrow(self.row_dim, valid, rows - valid).zero_()

    def check_rows(self, tensor: torch.Tensor, valid: int) -> int:
        """The rows that ``tensor`` has. Raises ResultMismatchError when ``valid`` of them cannot be live."""
        rows = tensor.shape[self.row_dim]
        if not 0 <= valid <= rows:
            raise ResultMismatchError(
                f"{self.name}: valid_rows returned {valid}, but dimension {self.row_dim} has {rows} rows; "
                "return the live rows of the current step"
            )
        return rows


def run_plain(spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    """The call as it runs outside a breakable capture: the function, then defined tails."""
    if has_live(args, kwargs):
        args, kwargs = resolved(args, kwargs)
    result = fn(*args, **kwargs)
    if spec.valid_rows is not None:
        valid = spec.valid_rows()
        written = spec.mutated(args, kwargs)
        returned = [leaf for _, leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in written + [t for t in returned if all(t is not w for w in written)]:
            if tensor.dim() > spec.row_dim:
                spec.define_tail(tensor, valid)
    return result


def run_break(spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    """The same where a replay will run it as Python."""
    with the_truth():
        return run_plain(spec, fn, args, kwargs)


def _call(spec: BreakSpec, fn: Callable[..., Tree], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    builder = active.builder
    if builder is not None:
        return builder.call_break(spec, fn, args, kwargs)
    if torch.cuda.is_initialized() and is_capturing():
        raise ForeignCaptureError(
            f"{spec.name} is marked as an eager break and was called while this stream is being captured by code that "
            "does not know breaks; capture with breakgraph, or call the undecorated function"
        )
    if active.warm_up is not None:
        return active.warm_up.call_break(spec, fn, args, kwargs)
    run = run_break if spec.always or are_breaks_told_otherwise() else run_plain
    return run(spec, fn, args, kwargs)


class EagerBreak:
    """A marked call. Calling it outside a breakable capture, or inside another break, just runs it."""

    def __init__(
        self,
        fn: Callable[..., Tree],
        *,
        mutates: Sequence[str] = (),
        valid_rows: Callable[[], int] | None = None,
        row_dim: int = 0,
        name: str | None = None,
        always: bool = False,
        reason: str = "",
    ) -> None:
        if isinstance(fn, staticmethod | classmethod):
            raise ConfigError(f"put @{type(fn).__name__} above @eager_on_graph, which marks the function itself")
        signature = inspect.signature(fn)
        for parameter in mutates:
            if parameter not in signature.parameters:
                raise UnknownNameError("parameter in mutates=", parameter, signature.parameters)
        functools.update_wrapper(self, fn)
        self.fn = fn
        shown = name or getattr(fn, "__qualname__", repr(fn)).replace("<locals>.", "")
        self.spec = BreakSpec(shown, tuple(mutates), valid_rows, row_dim, signature, always, reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        return _call(self.spec, self.fn, args, kwargs)


class MarkedFunction(EagerBreak):
    """What a decorator gives: as an attribute of a class it becomes a method.

    :func:`mark_eager` puts plain marks on modules: Dynamo of torch 2.11 would bind these, though an instance has them.
    """

    def __init__(self, fn: Callable[..., Tree], **options: Any) -> None:
        super().__init__(fn, **options)
        self._method_spec: BreakSpec | None = None

    def __get__(self, instance: object, owner: type | None = None) -> EagerBreak | _MethodBreak:
        if instance is None:
            return self
        if self._method_spec is None:
            _, *parameters = self.spec.signature.parameters.values()
            self._method_spec = replace(self.spec, signature=self.spec.signature.replace(parameters=parameters))
        return _MethodBreak(self._method_spec, functools.partial(self.fn, instance))


class BoundBreak(EagerBreak):
    """A marked function whose work on its arguments is done once for each captured call.

    Not for users: nothing looks at what ``bind`` reads. What it keeps of a tensor's values, of a weight or of random
    numbers is the capture's for good.

    Args:
        bind: Gets the arguments of a captured call. What it gives is called in place of the function, without any, by
            the capture and by every replay, and has to do the same.
    """

    def __init__(
        self, fn: Callable[..., Tree], bind: Callable[..., Callable[[], Tree]], mutates: Sequence[str] = ()
    ) -> None:
        super().__init__(fn, mutates=mutates)
        self.spec = replace(self.spec, bind=bind)


class _MethodBreak:
    """A marked method, bound: the instance is closed over and kept, not walked as an argument."""

    __slots__ = ("fn", "spec")

    def __init__(self, spec: BreakSpec, fn: Callable[..., Tree]) -> None:
        self.spec = spec
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        return _call(self.spec, self.fn, args, kwargs)


def is_break(fn: object) -> bool:
    """Whether ``fn`` is a marked function or a marked method."""
    return isinstance(fn, EagerBreak | _MethodBreak)


@overload
def eager_on_graph(fn: Callable[..., Tree]) -> MarkedFunction: ...


@overload
def eager_on_graph(
    *, mutates: Sequence[str] = (), valid_rows: Callable[[], int] | None = None, row_dim: int = 0
) -> Callable[[Callable[..., Tree]], MarkedFunction]: ...


def eager_on_graph(
    fn: Callable[..., Tree] | None = None,
    *,
    mutates: Sequence[str] = (),
    valid_rows: Callable[[], int] | None = None,
    row_dim: int = 0,
) -> MarkedFunction | Callable[[Callable[..., Tree]], MarkedFunction]:
    """Mark a function or method as an eager break.

    Args:
        fn: The function. Its arguments are tensors, immutable constants or modules, in any container; what changes
            from step to step is read inside it, from the step's own context.
        mutates: Names of parameters it writes in place. If it returns one, nothing is copied.
        valid_rows: Called at every run; the number of live rows of this step. Later rows are zeroed. Capture with all
            rows live.
        row_dim: The dimension those rows are counted along.

    Raises:
        UnknownNameError: ``mutates`` names no parameter.
    """
    mark = functools.partial(MarkedFunction, mutates=mutates, valid_rows=valid_rows, row_dim=row_dim)
    return mark if fn is None else mark(fn)


@eager_on_graph
def break_graph() -> None:
    """An empty break: ends the segment here and starts another."""


class Marks:
    """The modules that :func:`mark_eager` marked. ``remove()`` takes the marks off."""

    def __init__(self) -> None:
        self._unmarked: dict[str, tuple[torch.nn.Module, object]] = {}

    @property
    def names(self) -> list[str]:
        """Qualified names of the marked modules."""
        return list(self._unmarked)

    def add(self, name: str, module: torch.nn.Module, mark: EagerBreak) -> None:
        """Put ``mark`` in the place of the module's ``forward``."""
        self._unmarked[name] = (module, module.__dict__.get("forward"))
        module.__dict__["forward"] = mark

    def remove(self) -> None:
        """Give every module the ``forward`` it had."""
        for module, forward in self._unmarked.values():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
        self._unmarked = {}


def mark_eager(
    model: torch.nn.Module,
    pattern: str,
    *,
    mutates: Sequence[str] = (),
    valid_rows: Callable[[], int] | None = None,
    row_dim: int = 0,
) -> Marks:
    """Make the ``forward`` of every module whose qualified name matches ``pattern`` an eager break.

    Args:
        model: Its code is not touched; the marks sit on the instances.
        pattern: Shell-style, e.g. ``"*.self_attn"``.
        mutates: See :func:`eager_on_graph`.
        valid_rows: See :func:`eager_on_graph`.
        row_dim: See :func:`eager_on_graph`.

    Raises:
        UnknownNameError: nothing matches.
    """
    found = {n: m for n, m in model.named_modules() if n and fnmatch.fnmatchcase(n, pattern)}
    if not found:
        raise UnknownNameError("module pattern", pattern, [n for n, _ in model.named_modules() if n][:20])
    marks = Marks()
    for name, module in found.items():
        if not isinstance(module.forward, EagerBreak):
            forward = module.forward
            mark = EagerBreak(forward, mutates=mutates, valid_rows=valid_rows, row_dim=row_dim, name=name)
            marks.add(name, module, mark)
    return marks
