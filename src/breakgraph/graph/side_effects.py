"""Which attributes of modules a call changed: state that is made on first use, and Python that a replay skips."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch

from breakgraph.graph.eager_break import EagerBreak

T = TypeVar("T")
_CONTAINERS = (list, dict, set, deque)
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Attribute(NamedTuple):
    """One attribute, buffer or parameter of a module."""

    module: torch.nn.Module
    name: str


class _Seen(NamedTuple):
    """A value and what can be told about it later; holding the value keeps its identity from being used again."""

    value: Any
    content: Any

    def is_same(self, other: _Seen) -> bool:
        is_value = self.value is other.value or (
            issubclass(type(self.value), (bool, int, float, complex, str, bytes, torch.Size, torch.dtype))
            and type(self.value) is type(other.value)
            and self.value == other.value
        )
        return is_value and self.content == other.content


def _look_at(value: Any) -> _Seen:
    if issubclass(type(value), _CONTAINERS):
        items = value.values() if issubclass(type(value), dict) else value
        return _Seen(value, [id(item) for item in items])
    return _Seen(value, value.data_ptr() if type(value) in (torch.Tensor, torch.nn.Parameter) else None)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in module.__dict__.items():
        if name in _REGISTRIES:
            yield from value.items()
        elif name != "forward" and not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            yield name, value


class AttributeWatch:
    """What the attributes of some modules hold, to be compared with what they hold later.

    Args:
        roots: These modules and all below them.
    """

    def __init__(self, roots: Mapping[str, torch.nn.Module]) -> None:
        found = {id(module): module for root in roots.values() for module in root.modules()}
        self._modules = list(found.values())
        self._before: dict[Attribute, _Seen] = {}
        self._allowed: set[Attribute] = set()
        self.renew()

    def renew(self) -> None:
        """Compare with what the attributes hold now."""
        self._before = self._look()
        self._allowed = set()

    def changed(self) -> list[Attribute]:
        """What was added, removed, replaced, or grew since; without what :meth:`allowing` was told of."""
        now = self._look()
        keys = dict.fromkeys([*self._before, *now])
        return [key for key in keys if key not in self._allowed and self._differs(self._before, now, key)]

    def allowing(self, call: Callable[[], Any]) -> Any:
        """Run ``call``; what it changes is not counted."""
        before = self._look()
        try:
            return call()
        finally:
            now = self._look()
            self._allowed |= {key for key in {**before, **now} if self._differs(before, now, key)}

    @staticmethod
    def _differs(before: Mapping[Attribute, _Seen], now: Mapping[Attribute, _Seen], key: Attribute) -> bool:
        return key not in before or key not in now or not before[key].is_same(now[key])

    def _look(self) -> dict[Attribute, _Seen]:
        return {
            Attribute(module, name): _look_at(value) for module in self._modules for name, value in _attributes(module)
        }


def reachable_modules(fn: object) -> dict[str, torch.nn.Module]:
    """Modules that a function can be seen to use, under names for a person: itself, its owner, what it closes over, the
    globals that its code names, and the same for functions found in this way."""
    found: dict[int, torch.nn.Module] = {}
    visited: set[int] = set()
    waiting: list[object] = [fn]
    while waiting:
        item = waiting.pop(0)
        if id(item) in visited:
            continue
        visited.add(id(item))
        waiting += _uses(item)
        if _is_a(item, torch.nn.Module):
            found[id(item)] = item
    inner = {id(m) for module in found.values() for m in module.modules() if m is not module}
    roots = [module for key, module in found.items() if key not in inner]
    return {_root_name(module, index, roots): module for index, module in enumerate(roots)}


def _uses(item: object) -> Sequence[object]:
    """What a function can be seen to use, itself no module. What a break uses runs as Python at every replay."""
    if _is_a(item, torch.nn.Module) or _is_a(item, EagerBreak):
        return ()
    if _is_a(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if _is_a(item, types.MethodType):
        return [item.__self__, item.__func__]
    if _is_a(item, types.FunctionType):
        filled = [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
        return filled + [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
    if (_is_a(item, tuple) or _is_a(item, list)) and len(item) < 100:
        return item
    return ()


def _is_a(item: object, kind: type[T]) -> TypeGuard[T]:
    """By its type alone: proxies for what is not there yet fail when `isinstance` asks them."""
    return issubclass(type(item), kind)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _root_name(module: torch.nn.Module, index: int, roots: list[torch.nn.Module]) -> str:
    name = type(module).__name__
    return name if sum(type(other) is type(module) for other in roots) == 1 else f"{name}[{index}]"
