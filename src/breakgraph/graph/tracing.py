"""Tracing a whole forward with Dynamo: the calls that it does not look into, and what is known of them beforehand.

The forward first runs eagerly under a :class:`CallLog`, which notes what marked and untraced calls were given and what
they returned. While Dynamo traces it, each of these calls becomes one opaque node of the FX graph (:func:`is_opaque`)
whose results have the noted shapes; no such function ever sees a fake tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from breakgraph.errors import CaptureError, UntraceableError
from breakgraph.graph import declared, eager_break
from breakgraph.graph.boundary import geometry
from breakgraph.graph.eager_break import BreakSpec, active, run_plain
from breakgraph.graph.opaque_call import OpaqueCall, Slot, Template, look_of, noted_leaf, structure_of
from breakgraph.graph.tree import Tree, describe, is_constant, tree_leaves, tree_map


class CallLog:
    """Takes the marked and untraced calls of a forward that runs eagerly on this thread."""

    def __init__(self, device_type: str) -> None:
        self.calls: list[OpaqueCall] = []
        self._device_type = device_type
        self._is_inside = False

    @property
    def is_recording(self) -> bool:
        return not self._is_inside

    def unwatched(self, call: Callable[[], Any], reads: Iterable[torch.Tensor]) -> Any:
        raise UntraceableError(
            "the forward holds layers that are compiled already, and torch.compile traces it as a whole; use backend "
            "'breakable', which needs no tracing, or do without fusion"
        )

    def compiled(self, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        return call(*args)

    def constant(self, value: Any, read: Callable[[], Any]) -> Any:
        found = read()
        if not self._is_inside:
            given = [value] if isinstance(value, torch.Tensor) else []
            self._note("breakgraph.constant()", None, given, {}, found)
        return found

    def call_break(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tree:  # fmt: skip
        def call(args: Sequence[Any], kwargs: dict[str, Any]) -> Tree:
            return _eager_call(spec, fn, tuple(args), kwargs)

        return self._run(spec.name, lambda: run_plain(spec, fn, args, kwargs), call, args, kwargs)

    def call_untraced(self, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]) -> Tree:
        """A call of an :class:`Untraced`."""

        def call(args: Sequence[Any], kwargs: dict[str, Any]) -> Tree:
            return fn(*args, **kwargs)

        return self._run(fn.__qualname__, lambda: fn(*args, **kwargs), call, args, kwargs)

    def _run(
        self, name: str, now: Callable[[], Tree], later: Callable[[Sequence[Any], dict[str, Any]], Tree],
        args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> Tree:  # fmt: skip
        if self._is_inside:
            return now()
        self._is_inside = True
        try:
            result = now()
        finally:
            self._is_inside = False
        self._note(name, later, args, kwargs, result)
        return result

    def _note(self, name: str, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tree) -> None:
        given: list[torch.Tensor] = []
        find_tensors(list(args), given)
        find_tensors(dict(kwargs), given)
        slots = iter(range(len(given)))

        def slot(leaf: Any, _: str) -> Any:
            return Slot(next(slots)) if isinstance(leaf, torch.Tensor) else leaf

        stripped = tree_map(slot, list(args)), tree_map(slot, dict(kwargs))
        places = {geometry(tensor): index for index, tensor in reversed(list(enumerate(given)))}
        leaves = [leaf for _, leaf in tree_leaves(result)]
        fresh = tuple(i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and geometry(v) not in places)
        numbers = iter(range(len(fresh)))
        template = _template(result, places, numbers, name)
        looks = tuple(look_of(leaves[index]) for index in fresh)
        noted = tuple(noted_leaf(leaf, places) for leaf in leaves)
        device = str(leaves[fresh[0]].device) if fresh else self._device_type
        structure = structure_of(result)
        self.calls.append(OpaqueCall(name, call, *stripped, template, structure, noted, fresh, looks, device))

    def __enter__(self) -> CallLog:
        active.builder = self
        return self

    def __exit__(self, *exc: object) -> None:
        active.builder = None


def find_tensors(node: Tree, found: list[torch.Tensor]) -> None:
    """Append the tensors of a tree in the order of its leaves. Dynamo traces this."""
    if isinstance(node, torch.Tensor):
        found.append(node)
    elif isinstance(node, tuple | list):
        for item in node:
            find_tensors(item, found)
    elif isinstance(node, dict):
        for item in node.values():
            find_tensors(item, found)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for field in dataclasses.fields(node):
            find_tensors(getattr(node, field.name), found)


def _template(node: Tree, places: Mapping[Any, int], numbers: Iterator[int], name: str) -> Template:
    if isinstance(node, torch.Tensor):
        key = geometry(node)
        return ("given", places[key]) if key in places else ("made", next(numbers))
    if isinstance(node, dict) and type(node) is dict:
        return ("dict", tuple((k, _template(v, places, numbers, name)) for k, v in node.items()))
    if isinstance(node, tuple | list) and type(node) is not torch.Size:
        items = tuple(_template(item, places, numbers, name) for item in node)
        if type(node) in (tuple, list):
            return (type(node).__name__, items)
        return ("make", type(node), items)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
        return ("object", type(node), tuple((k, _template(v, places, numbers, name)) for k, v in fields))
    if is_constant(node):
        return ("is", node)
    raise CaptureError(
        f"{name} returned {describe(node)}, which traced code cannot be given; return tensors, constants, tuples, "
        "lists, dicts or dataclasses of them, or use backend 'breakable', which traces nothing"
    )


def _built(template: Template, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Tree:
    """The result that a template tells. Dynamo traces this."""
    kind = template[0]
    if kind == "is":
        return template[1]
    if kind == "given":
        return given[template[1]]
    if kind == "made":
        return made[template[1]]
    if kind == "tuple":
        return tuple([_built(item, given, made) for item in template[1]])
    if kind == "list":
        return [_built(item, given, made) for item in template[1]]
    if kind == "dict":
        return {key: _built(item, given, made) for key, item in template[1]}
    if kind == "make":
        return template[1](*[_built(item, given, made) for item in template[2]])
    return template[1](**{key: _built(item, given, made) for key, item in template[2]})


class _Trace:
    """Of the trace in progress: results of the calls that it has not met yet."""

    def __init__(self) -> None:
        self.is_on = False
        self.results: list[tuple[str, Template, str, list[torch.Tensor]]] = []


_trace = _Trace()


def _opaque(
    name: str, device: str, samples: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """What Dynamo puts into its graph for a call. It runs this on fake tensors only.

    Args:
        samples: Tensors without memory that look like the fresh results. Dynamo takes their sizes for unknown ones, and
            finds out which of them have to be those of other tensors.
    """
    return tuple(torch.empty_strided(s.size(), s.stride(), dtype=s.dtype, device=device) for s in samples)


def is_opaque(target: object) -> bool:
    """Whether the target of an FX node is a call that was not looked into."""
    return target is _opaque


def _traced(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    """A call as Dynamo sees it."""
    given: list[torch.Tensor] = []
    find_tensors(args, given)
    find_tensors(kwargs, given)
    if not _trace.results:
        raise RuntimeError("more marked calls while the forward is traced than when it ran")
    expected, template, device, samples = _trace.results.pop(0)
    if expected != name:
        raise RuntimeError("other marked calls while the forward is traced than when it ran")
    return _built(template, given, _opaque(name, device, samples, given))


def traced_results(calls: Sequence[OpaqueCall]) -> None:
    """Tell the trace that begins now what the calls in it return."""
    _trace.is_on = True
    _trace.results = [(call.name, call.result, call.device, call.samples()) for call in calls]


_eager_call = eager_break._call


def _traced_call(spec: BreakSpec, fn: Callable[..., Tree], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    if torch.compiler.is_dynamo_compiling() and _trace.is_on:
        return _traced(spec.name, args, kwargs)
    return _eager_call(spec, fn, args, kwargs)


_eager_constant = declared._constant


def _traced_constant(value: Any) -> Any:
    if torch.compiler.is_dynamo_compiling() and _trace.is_on:
        return _traced("breakgraph.constant()", [value], {})
    return _eager_constant(value)


class Untraced:
    """A function that no trace looks into: it is recorded as it runs, between compiled pieces, and is no break."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.name = fn.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and _trace.is_on:
            return _traced(self.name, args, kwargs)
        log = active.builder
        return log.call_untraced(self.fn, args, kwargs) if isinstance(log, CallLog) else self.fn(*args, **kwargs)


class TracePlace:
    """A function that is called by name, and what stands there while a whole forward is traced.

    Args:
        put: Puts a function there.
        usual: What stands there otherwise.
        traced: What Dynamo can trace, and does the same.
    """

    def __init__(self, put: Callable[[Any], None], usual: Callable[..., Any], traced: Callable[..., Any]) -> None:
        self._put = put
        self._usual = usual
        self._traced = traced
        self._is_hidden = False
        _places.append(self)

    def hide(self) -> None:
        """Make Dynamo leave the function alone where it compiles parts of a forward: what lies before it, and what
        lies behind it."""
        if self._is_hidden:
            return
        import torch._dynamo

        self._is_hidden = True
        self._usual = torch._dynamo.disable(self._usual)
        self.swap(False)

    def swap(self, is_traced: bool) -> None:
        """Put the one or the other there."""
        self._put(self._traced if is_traced else self._usual)


_places: list[TracePlace] = []
BREAKS = TracePlace(functools.partial(setattr, eager_break, "_call"), eager_break._call, _traced_call)
TracePlace(functools.partial(setattr, declared, "_constant"), declared._constant, _traced_constant)
_lock = threading.RLock()


@contextlib.contextmanager
def whole_trace() -> Iterator[None]:
    """Where a forward is run for its :class:`CallLog`, traced, and run as traced. One thread at a time."""
    import torch._dynamo

    with _lock:
        torch._dynamo.allow_in_graph(_opaque)
        for place in _places:
            place.swap(True)
        try:
            yield
        finally:
            for place in _places:
                place.swap(False)
            _trace.is_on, _trace.results = False, []
