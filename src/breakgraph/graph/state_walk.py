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
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, range})
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
CONTAINERS = (dict, *_SEQUENCES, *_SETS)
_FOREIGN = frozenset({"torch", "numpy", "triton", "breakgraph", *sys.stdlib_module_names})
"""Packages whose objects change as they like: nothing that is captured depends on it."""
_ITERATORS = (type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")))


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
            far += ((function, None) for function in _code_behind(item) if id(function) not in found)
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
        return {key if _is_plain_key(key) else (type(key).__name__, id(key)): value for key, value in list(item.items())}
    if issubclass(type(item), _SETS):
        return {one if _is_plain_key(one) else (type(one).__name__, id(one)): one for one in list(item)}
    return dict(enumerate(item))


def _is_plain_key(key: object) -> bool:
    return type(key) in PLAIN


def _variables(function: types.FunctionType) -> dict[Any, Any]:
    """What code keeps between calls: variables around it, defaults, attributes of its own, and globals that it names."""
    names = function.__code__.co_freevars
    held: dict[Any, Any] = {
        name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True) if is_filled(cell)
    }
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
    for name, slot in _slots(type(item)).items():
        try:
            held[name] = slot.__get__(item)
        except AttributeError:  # not filled
            continue
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except Exception:  # no attributes, or a proxy with nothing behind it
        attributes = None
    if issubclass(type(attributes), dict):
        held |= {name: value for name, value in list(attributes.items())}
    return held


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> Mapping[str, types.MemberDescriptorType]:
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType) and not name.startswith("__")
    }


def _code_behind(item: object) -> Iterator[object]:
    """The functions that a call of an object runs, as far as names show, and its class."""
    if is_a(item, types.MethodType):
        yield from _methods(type(item.__self__), item.__func__.__name__)
        yield item.__func__
    elif is_a(item, torch.nn.Module):
        yield from _methods(type(item), "forward")
    elif not issubclass(type(item), (type, types.FunctionType, functools.partial, *CONTAINERS)):
        yield from _methods(type(item), "__call__")
    else:
        return
    yield type(item)


@functools.lru_cache(maxsize=4096)
def _methods(kind: type, first: str) -> tuple[types.FunctionType, ...]:
    """A method of a class, and those that it names."""
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
    return tuple(found.values())


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
