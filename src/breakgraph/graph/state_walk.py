"""Which Python objects a function can be seen to keep state in, and what each of them holds."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch

from breakgraph.graph.side_effects import attributes_of, is_a, is_filled

_MOST_NODES = 50_000
_LONG = 1_000
"""Containers of more items are compared, and what they hold is not looked into."""
_LONGEST = 100_000
"""Of those, only the length is compared."""
PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), slice, range, torch.Size, torch.dtype, torch.device,
))  # fmt: skip
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
CONTAINERS = (dict, *_SEQUENCES, *_SETS)
_FOREIGN = frozenset({"torch", "numpy", "triton", "breakgraph", *sys.stdlib_module_names})
"""Packages whose objects change as they like: nothing that is captured depends on it."""
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))


class Global(NamedTuple):
    """The key of what a function takes from its module."""

    name: str


class Node(NamedTuple):
    """One object, and what it held.

    Attributes:
        entries: By attribute, key, place or variable.
        came: Where it was found first: the identity of the object around it, and the key there.
        is_near: Reached through arguments, closures and modules. What is reached through the globals of code may grow:
            caches do.
    """

    owner: object
    entries: dict[Any, Any]
    came: tuple[int, Any] | None
    is_near: bool


def walk(roots: list[object]) -> dict[int, Node]:
    """Everything with state that can be reached, by identity, nearest first; what comes past a limit is left out."""
    found: dict[int, Node] = {}
    methods: _Methods = {}
    near: deque[tuple[object, tuple[int, Any] | None]] = deque((root, None) for root in roots)
    far: deque[tuple[object, tuple[int, Any] | None]] = deque()
    for queue in (near, far):
        while queue and len(found) < _MOST_NODES:
            item, came = queue.popleft()
            if id(item) in found:
                continue
            entries = entries_of(item)
            if entries is None:
                continue
            found[id(item)] = Node(item, entries, came, queue is near)
            if len(entries) <= _LONG:
                for key, value in entries.items():
                    if type(value) not in PLAIN and id(value) not in found:
                        (far if type(key) is Global else queue).append((value, (id(item), key)))
            far += ((function, None) for function in _code_behind(item, methods) if id(function) not in found)
    return found


def entries_of(item: object) -> dict[Any, Any] | None:
    """What an object holds; None for one that is not looked into."""
    kind = type(item)
    if kind in PLAIN or issubclass(kind, torch.Tensor | types.ModuleType | Enum):
        return None
    if is_a(item, torch.nn.Module):
        return dict(attributes_of(item))
    if issubclass(kind, CONTAINERS):
        return _contents(item)
    if is_a(item, types.FunctionType):
        return _variables(item)
    if is_a(item, types.MethodType):
        return {"self": item.__self__}
    if is_a(item, functools.partial):
        return {"func": item.func} | dict(enumerate(item.args)) | item.keywords
    if is_a(item, type):
        return None if _is_foreign(item.__module__) else {k: v for k, v in vars(item).items() if type(v) in PLAIN}
    return _hidden_state(item) if _is_foreign(kind.__module__) and kind is not types.SimpleNamespace else _fields(item)


def _contents(item: Any) -> dict[Any, Any]:
    if len(item) > _LONGEST:
        return {"len()": len(item)}
    if issubclass(type(item), dict):
        return {_plain_key(key): value for key, value in list(item.items())}
    return {_plain_key(one): one for one in list(item)} if issubclass(type(item), _SETS) else dict(enumerate(item))


def _plain_key(key: Any) -> Any:
    """Nobody asks objects of a user's whether they are equal."""
    return key if type(key) in PLAIN else (type(key).__name__, id(key))


def _variables(function: types.FunctionType) -> dict[Any, Any]:
    """What code keeps between calls: variables around it, defaults, attributes of its own, globals that it names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held: dict[Any, Any] = {name: cell.cell_contents for name, cell in cells if is_filled(cell)}
    if _is_foreign(function.__module__):
        return held  # a decorator: what it wraps counts
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    held |= zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    held |= function.__kwdefaults__ or {}
    held |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
    space = function.__globals__
    return held | {Global(name): space[name] for name in _names_in(code) if name in space}


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = itertools.chain.from_iterable(_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _hidden_state(item: Any) -> dict[Any, Any] | None:
    """Of objects that are no Python inside and that code asks for one value after the other."""
    kind = type(item)
    if issubclass(kind, random.Random):
        return {"getstate()": hash(item.getstate())}
    if kind.__module__.startswith("numpy.random") and hasattr(kind, "bit_generator"):
        return {"state": repr(item.bit_generator.state)}
    if kind is itertools.count:
        return {"next": repr(item)}
    return {"left": operator.length_hint(item)} if kind in _ITERATORS else None


def _fields(item: object) -> dict[Any, Any] | None:
    held: dict[Any, Any] = {}
    for name, slot in _slots(type(item)):
        try:
            held[name] = slot.__get__(item)
        except AttributeError:  # not filled
            continue
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except Exception:  # no attributes, or a proxy with nothing behind it
        attributes = None
    if issubclass(type(attributes), dict):
        held |= attributes
    return held


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    """Those that classes declare, and what reads them."""
    for base in kind.__mro__:
        declared = base.__dict__.get("__slots__", ())
        for name in [declared] if isinstance(declared, str) else declared:
            is_private = name.startswith("__") and not name.endswith("__")
            held = base.__dict__.get(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
            if isinstance(held, types.MemberDescriptorType):
                yield name, held


_Methods = dict[tuple[type, str], list[types.FunctionType]]


def _code_behind(item: object, known: _Methods) -> Iterator[object]:
    """The functions that a call of an object runs, as far as names show, and its class."""
    if is_a(item, types.MethodType):
        yield from _methods(type(item.__self__), item.__func__.__name__, known)
        yield item.__func__
    elif is_a(item, torch.nn.Module):
        yield from _methods(type(item), "forward", known)
    elif not issubclass(type(item), (type, types.FunctionType, functools.partial, *CONTAINERS)):
        yield from _methods(type(item), "__call__", known)
    else:
        return
    yield type(item)


def _methods(kind: type, first: str, known: _Methods) -> list[types.FunctionType]:
    """A method of a class, and those that it names."""
    if (kind, first) in known:
        return known[kind, first]
    found: dict[str, types.FunctionType] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        held = inspect.getattr_static(kind, name, None)
        function = getattr(held, "__func__", None) or getattr(held, "fget", None) or held
        if name not in found and is_a(function, types.FunctionType) and not _is_foreign(function.__module__):
            found[name] = function
            inner = inspect.unwrap(function)
            waiting += _names_in(inner.__code__) if is_a(inner, types.FunctionType) else ()
    return known.setdefault((kind, first), list(found.values()))


@functools.lru_cache(maxsize=4096)
def _is_foreign(module: str | None) -> bool:
    return module is None or (module.partition(".")[0] in _FOREIGN and module != "__main__")


def label(owner: object, key: Any, names: Mapping[int, str]) -> tuple[str, bool]:
    """How the way from an object to what it holds is written, and whether this begins a name for a person."""
    if is_a(owner, types.FunctionType):
        return (key.name if type(key) is Global else key), True
    if is_a(owner, types.MethodType):
        return type(owner.__self__).__name__, True
    if is_a(owner, functools.partial):
        return (f"argument {key}" if type(key) is int else key), True
    if is_a(owner, type):
        return f"{owner.__name__}.{key}", True
    if issubclass(type(owner), _SETS):
        return f"{{{key!r}}}"[:60], False
    if issubclass(type(owner), (dict, *_SEQUENCES)):
        return f"[{key!r}]"[:60], False
    if id(owner) in names:
        return f"{names[id(owner)]}.{key}", True
    return f".{key}", False
