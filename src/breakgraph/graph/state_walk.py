"""Which Python objects a function can be seen to keep state in, and what each of them holds."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import UUID

import torch

from breakgraph.graph.refusals import is_user_file
from breakgraph.graph.side_effects import attributes_of, copy_of, is_a, is_filled, length_of, package_of, safely

MOST_NODES = 50_000
_LONG = 1_000
"""Containers of more items are compared, and what they hold is not looked into."""
_LONGEST = 100_000
"""Of those, only the length is compared."""
PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), slice, range, torch.Size, torch.dtype, torch.device,
    Decimal, Fraction, date, datetime, time, timedelta, timezone, UUID,
))  # fmt: skip
_DEEPEST = 8
"""Of tuples that are values."""
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
CONTAINERS = (dict, *_SEQUENCES, *_SETS)
_FOREIGN = frozenset({"torch", "numpy", "triton", "breakgraph", *sys.stdlib_module_names})
"""Packages whose objects change as they like: nothing that is captured depends on it."""
_OPEN = frozenset({
    ("types", "SimpleNamespace"), ("argparse", "Namespace"), ("collections", "UserDict"), ("collections", "UserList"),
})  # fmt: skip
"""Classes of these packages that hold what users put into them, as attributes."""
_INSTALLED = ("site-packages", "dist-packages")
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
        while queue and len(found) < MOST_NODES:
            item, came = queue.popleft()
            if id(item) in found:
                continue
            entries = entries_of(item)
            if entries is None:
                continue
            found[id(item)] = Node(item, entries, came, queue is near)
            if len(entries) <= _LONG:
                for key, value in entries.items():
                    if (type(value) is tuple or not is_plain(value)) and id(value) not in found:
                        is_far = type(key) is Global or is_a(item, type)
                        (far if is_far else queue).append((value, (id(item), key)))
            behind: list[object] = safely(lambda item: list(_code_behind(item, methods)), item, list[object]())
            far += ((function, None) for function in behind if id(function) not in found)
    return found


def is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether it is a value, which nothing changes: compared by what it is."""
    kind = type(value)
    if kind is tuple:
        return depth > 0 and len(value) <= _LONG and all(is_plain(one, depth - 1) for one in value)
    return kind in PLAIN or issubclass(kind, PurePath) or _is_numpy_scalar(kind)


def _is_numpy_scalar(kind: type) -> bool:
    names = [base.__name__ for base in kind.__mro__] if getattr(kind, "__module__", "") == "numpy" else []
    return "generic" in names and "void" not in names


def entries_of(item: object) -> dict[Any, Any] | None:
    """What an object holds; None for one that is not looked into, or that fails when it is looked at."""
    return safely(_held_by, item, None)


def _held_by(item: object) -> dict[Any, Any] | None:
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
        return None if _is_foreign(item) else dict(_of_the_class(item))
    return _hidden_state(item) if _is_foreign(kind) and (kind.__module__, kind.__name__) not in _OPEN else _fields(item)


def _of_the_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The values and containers that it holds for all of its objects."""
    for name, value in list(vars(kind).items()):
        if is_plain(value) or (issubclass(type(value), CONTAINERS) and not name.startswith("__")):
            yield name, value


def _contents(item: Any) -> dict[Any, Any]:
    length = length_of(item)
    if length > _LONGEST:
        return {"len()": length}
    items = copy_of(item)
    if issubclass(type(item), dict):
        return {_plain_key(key): value for key, value in items}
    return {_plain_key(one): one for one in items} if issubclass(type(item), _SETS) else dict(enumerate(items))


def _plain_key(key: Any) -> Any:
    """Nobody asks objects of a user's whether they are equal."""
    return key if is_plain(key) else (type(key).__name__, id(key))


def _variables(function: types.FunctionType) -> dict[Any, Any]:
    """What code keeps between calls: variables around it, defaults, attributes of its own, globals that it names."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held: dict[Any, Any] = {name: cell.cell_contents for name, cell in cells if is_filled(cell)}
    if _is_foreign(function):
        return held  # a decorator: what it wraps counts
    around = dict(held)
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    held |= zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    held |= function.__kwdefaults__ or {}
    held |= {f"{function.__name__}.{name}": value for name, value in list(vars(function).items())}
    space, names = function.__globals__, _names_in(code)
    around |= {name: space.get(name, sys.modules.get(name)) for name in names if name in space or name in sys.modules}
    held |= {Global(name): space[name] for name in names if name in space}
    for name, value in around.items():
        if is_a(value, types.ModuleType):
            held |= _of_the_module(name, value, names)
    return held


def _of_the_module(path: str, module: types.ModuleType, names: tuple[str, ...]) -> dict[Global, Any]:
    """What code takes from a module of the user's, and from those in it, as far as names show."""
    held: dict[Global, Any] = {}
    waiting = [(path, module)]
    seen = set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen or not _is_of_the_user(module):
            continue
        seen.add(id(module))
        space = vars(module)
        for name in names:
            value = space.get(name)
            if is_a(value, types.ModuleType):
                waiting.append((f"{path}.{name}", value))
            elif name in space:
                held[Global(f"{path}.{name}")] = value
    return held


def _is_of_the_user(module: types.ModuleType) -> bool:
    """Neither of the standard library nor installed."""
    space = vars(module)
    name, file = space.get("__name__"), space.get("__file__")
    if type(name) is not str or name.partition(".")[0] in _FOREIGN:
        return False
    return type(file) is not str or (is_user_file(file) and not any(map(file.__contains__, _INSTALLED)))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = itertools.chain.from_iterable(_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _hidden_state(item: Any) -> dict[Any, Any] | None:
    """Of objects that are no Python inside and that code asks for one value after the other."""
    kind = type(item)
    if issubclass(kind, random.Random):
        return {"getstate()": hash(item.getstate())}
    if kind.__module__.startswith("numpy.random"):
        bits = item.bit_generator if hasattr(kind, "bit_generator") else item._bit_generator
        return {"state": hash(pickle.dumps(bits.state))}
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
        for hooks in (item._forward_pre_hooks, item._forward_hooks):
            yield from list(hooks.values())
    elif not issubclass(type(item), (type, types.FunctionType, functools.partial, *CONTAINERS)):
        yield from _methods(type(item), "__call__", known)
    else:
        return
    yield from (base for base in type(item).__mro__ if not _is_foreign(base))


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
        if name not in found and is_a(function, types.FunctionType) and not _is_foreign(function):
            found[name] = function
            inner = inspect.unwrap(function)
            waiting += _names_in(inner.__code__) if is_a(inner, types.FunctionType) else ()
    return known.setdefault((kind, first), list(found.values()))


def _is_foreign(item: object) -> bool:
    """A class or function."""
    package = package_of(item)
    return package is None or (package in _FOREIGN and package != "__main__")


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
