"""Which attributes of modules, and of objects around them, a call changed: state that is made on first use, and Python
that a replay skips."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch

from breakgraph.graph.eager_break import EagerBreak

T = TypeVar("T")
_CONTAINERS = (list, dict, set, deque)
_FOREIGN = {"builtins", "functools", "types", "torch", "numpy", "logging", "threading", "breakgraph"}
"""Packages whose objects change as they like: nothing that is captured depends on it."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """One attribute of a module or another object; of a module, also a buffer or parameter.

    Equal to another of the same name on the very same object: objects may be equal to others, or have no hash.
    """

    owner: object
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attribute) and self.owner is other.owner and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))


_Key = tuple[int, str]
"""An object's identity and the name of an attribute."""


class _Seen(NamedTuple):
    """A value and what can be told about it later; holding the value keeps its identity from being used again."""

    value: Any
    content: Any

    def is_same(self, other: _Seen) -> bool:
        is_value = self.value is other.value or (
            issubclass(type(self.value), (bool, int, float, complex, str, bytes, torch.Size, torch.dtype))
            and type(self.value) is type(other.value)
            and is_equal(self.value, other.value)
        )
        return is_value and self.content == other.content


def _look_at(value: Any) -> _Seen:
    if issubclass(type(value), _CONTAINERS):
        items = copy_of(value)
        return _Seen(value, [id(item[1] if issubclass(type(value), dict) else item) for item in items])
    return _Seen(value, value.data_ptr() if type(value) in (torch.Tensor, torch.nn.Parameter) else None)


def attributes_of(owner: object) -> Iterator[tuple[str, Any]]:
    """What an object holds by name, its hooks left out; of a module also parameters, buffers and modules."""
    for name, value in list(object.__getattribute__(owner, "__dict__").items()):
        if name in _REGISTRIES and is_a(owner, torch.nn.Module):
            yield from list(value.items())
        elif name != "forward" and not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            yield name, value


class AttributeWatch:
    """What the attributes of some objects hold, to be compared with what they hold later.

    Args:
        roots: These modules and all below them.
        holders: And these objects.
    """

    def __init__(self, roots: Iterable[torch.nn.Module], holders: Iterable[object] = ()) -> None:
        self._owners: dict[int, object] = {id(holder): holder for holder in holders}
        self._before: dict[_Key, _Seen] = {}
        self._allowed: set[_Key] = set()
        self.add(roots)
        self.renew()

    def add(self, roots: Iterable[torch.nn.Module]) -> None:
        """Compare these modules and all below them too, from the next :meth:`renew` on."""
        self._owners |= {id(module): module for root in roots for module in root.modules()}

    def renew(self) -> None:
        """Compare with what the attributes hold now."""
        self._before = self._look()
        self._allowed = set()

    def changed(self) -> list[Attribute]:
        """What was added, removed, replaced, or grew since; without what :meth:`allowing` was told of."""
        now = self._look()
        keys = dict.fromkeys([*self._before, *now])
        differing = (key for key in keys if key not in self._allowed and self._differs(self._before, now, key))
        return [Attribute(self._owners[owner], name) for owner, name in differing]

    def allowing(self, call: Callable[[], Any]) -> Any:
        """Run ``call``; what it changes is not counted."""
        before = self._look()
        try:
            return call()
        finally:
            now = self._look()
            self._allowed |= {key for key in {**before, **now} if self._differs(before, now, key)}

    @staticmethod
    def _differs(before: Mapping[_Key, _Seen], now: Mapping[_Key, _Seen], key: _Key) -> bool:
        return key not in before or key not in now or not before[key].is_same(now[key])

    def _look(self) -> dict[_Key, _Seen]:
        return {
            (ident, name): _look_at(value)
            for ident, owner in self._owners.items()
            for name, value in attributes_of(owner)
        }


class Reachable(NamedTuple):
    """What a function can be seen to use: modules, under names for a person, and other objects with attributes."""

    modules: dict[str, torch.nn.Module]
    holders: list[object]


def reachable(fn: object) -> Reachable:
    """The function itself, its owner, what it closes over, the globals that its code names, and the same for functions
    found in this way."""
    modules: dict[int, torch.nn.Module] = {}
    holders: list[object] = []
    visited: set[int] = set()
    waiting: list[object] = [fn]
    while waiting:
        item = waiting.pop(0)
        if id(item) in visited:
            continue
        visited.add(id(item))
        waiting += safely(_uses, item, ())
        if is_a(item, torch.nn.Module):
            modules[id(item)] = item
        elif safely(_is_holder, item, False):
            holders.append(item)
    return Reachable(named(outermost(modules.values())), holders)


def outermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that lie in no other."""
    modules = list(modules)
    inner = {id(m) for module in modules for m in module.modules() if m is not module}
    return [module for module in modules if id(module) not in inner]


def named(roots: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """By names for a person."""
    return {_root_name(module, index, roots): module for index, module in enumerate(roots)}


def _is_holder(item: object) -> bool:
    """Whether it is an object of the user's, whose attributes a call may change."""
    kind = type(item)
    if package_of(kind) in _FOREIGN or issubclass(kind, (type, *_CONTAINERS)):
        return False
    try:
        return isinstance(object.__getattribute__(item, "__dict__"), dict)
    except Exception:  # no attributes, or a proxy with nothing behind it
        return False


def _uses(item: object) -> Sequence[object]:
    """What a function can be seen to use, itself no module. What a break uses runs as Python at every replay."""
    if is_a(item, torch.nn.Module) or is_a(item, EagerBreak):
        return ()
    if is_a(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if is_a(item, types.MethodType):
        return [item.__self__, item.__func__]
    if is_a(item, types.FunctionType):
        filled = [cell.cell_contents for cell in item.__closure__ or () if is_filled(cell)]
        return filled + [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
    if is_a(item, tuple) or is_a(item, list):
        return copy_of(item) if length_of(item) < 100 else ()
    return ()


def package_of(item: object) -> str | None:
    """The package that a class or function says it is of, of classes that answer with anything at all too."""
    module = getattr(item, "__module__", None)
    return module.partition(".")[0] if type(module) is str else None if module is None else ""


def copy_of(container: Any) -> list[Any]:
    """Its contents, of a dict as pairs; no code of a subclass or key runs, and another thread may add to it."""
    taken = _COPIES[_builtin(container)]
    for _ in range(_TRIES):
        try:
            return taken(container)
        except RuntimeError:  # it changed while it was copied
            continue
    return taken(container)


def length_of(container: Any) -> int:
    """Of what :func:`copy_of` copies."""
    return int(_builtin(container).__len__(container))


def _builtin(container: Any) -> Any:
    return next(base for base in _COPIES if issubclass(type(container), base))


_TRIES = 100
_COPIES: Mapping[type, Callable[[Any], list[Any]]] = {
    dict: lambda items: list(dict.items(items)),
    list: lambda items: list(list.__iter__(items)),
    tuple: lambda items: list(tuple.__iter__(items)),
    deque: lambda items: list(deque.__iter__(items)),
    set: lambda items: list(set.__iter__(items)),
    frozenset: lambda items: list(frozenset.__iter__(items)),
}


def safely(look: Callable[[Any], T], item: object, otherwise: T) -> T:
    """Whatever an object does when it is looked at: a capture does not depend on that."""
    try:
        return look(item)
    except Exception:
        return otherwise


def is_equal(one: Any, other: Any) -> bool:
    """Of values. Those that cannot be compared count as equal."""
    return safely(lambda pair: bool(pair[0] == pair[1]), (one, other), True)


def is_a(item: object, kind: type[T]) -> TypeGuard[T]:
    """By its type alone: proxies for what is not there yet fail when `isinstance` asks them."""
    return issubclass(type(item), kind)


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable has a value by now."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _root_name(module: torch.nn.Module, index: int, roots: Sequence[torch.nn.Module]) -> str:
    name = type(module).__name__
    return name if sum(type(other) is type(module) for other in roots) == 1 else f"{name}[{index}]"
