"""Which plain Python values a call changed that it may read again: a replay runs no Python and goes on with the old."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

import torch

from breakgraph.graph.state_walk import CONTAINERS, PLAIN, Node, entries_of, label, walk
from breakgraph.graph.tree import describe

_MISSING: Any = object()
Step = tuple[int, Any]
"""From an object, by identity, to what it holds under a key."""


class Change(NamedTuple):
    """One value that is another now.

    Attributes:
        owner: Of the value; inside of all the objects on the way.
        path: For a person.
        told: What it was and is.
        way: From the outermost object to the value.
        around: The objects on the way, outermost first.
    """

    owner: object
    path: str
    told: str
    way: tuple[Step, ...]
    around: tuple[object, ...]


class StateWatch:
    """What objects that a function reaches hold, to be compared with what they hold later.

    Numbers, strings and tuples of them are compared by value, tensors by identity; objects and containers by what they
    hold, also where one takes the place of another. Other objects are not compared.

    Args:
        fn: The function, its arguments in a closure.
    """

    def __init__(self, fn: object) -> None:
        self._roots = [fn]
        self._before: dict[int, Node] = {}
        self._allowed: set[Step] = set()
        self._suspects: dict[int, object] = {}
        self._num_breaks = 0
        self.renew()

    def add(self, roots: Iterable[object]) -> None:
        """Compare what these reach too, from the next :meth:`renew` on."""
        self._roots += roots

    def renew(self) -> None:
        """Compare with what is held now."""
        self._before = walk(self._roots)
        self._allowed, self._num_breaks = set(), 0

    def forget(self) -> None:
        """Hold nothing any longer."""
        self._before, self._suspects = {}, {}

    def changed(self, names: Mapping[int, str] | None = None) -> list[Change]:
        """What differs, without what :meth:`allowing` was told of.

        Args:
            names: Of modules, by identity.
        """
        found = list(_differences(self._before, walk(self._roots), names or {}))
        return [change for change in found if self._allowed.isdisjoint(change.way)]

    def suspect(self, changes: Iterable[Change]) -> bool:
        """Watch the owners of these in :meth:`allowing`; returns whether a break may have made one of them unseen."""
        fresh = {id(change.owner): change.owner for change in changes if id(change.owner) not in self._suspects}
        self._suspects |= fresh
        return bool(fresh) and self._num_breaks > 0

    def allowing(self, call: Callable[[], Any]) -> Any:
        """Run ``call``; what it changes is not counted. Only what was seen to change before is looked at."""
        self._num_breaks += 1
        before = {key: entries_of(owner) or {} for key, owner in self._suspects.items()}
        try:
            return call()
        finally:
            for ident, owner in self._suspects.items():
                old, new = before[ident], entries_of(owner) or {}
                keys = (key for key in {**old, **new} if old.get(key, _MISSING) is not new.get(key, _MISSING))
                self._allowed |= {(ident, key) for key in keys}


def _differences(
    before: Mapping[int, Node], now: Mapping[int, Node], names: Mapping[int, str]
) -> Iterator[Change]:  # fmt: skip
    seen: set[tuple[int, int]] = set()
    for ident, old in before.items():
        new = now.get(ident)
        if new is not None and not _holds_same(old, new):
            yield from _compare(before, now, names, (old, new), _way_to(before, old), seen)


def _holds_same(old: Node, new: Node) -> bool:
    """At a glance."""
    return old.entries.keys() == new.entries.keys() and all(map(is_, old.entries.values(), new.entries.values()))


def _compare(
    before: Mapping[int, Node], now: Mapping[int, Node], names: Mapping[int, str], pair: tuple[Node, Node],
    way: tuple[tuple[object, Any], ...], seen: set[tuple[int, int]],
) -> Iterator[Change]:  # fmt: skip
    old, new = pair
    if (id(old.owner), id(new.owner)) in seen:
        return
    seen.add((id(old.owner), id(new.owner)))
    may_grow = not old.is_near and issubclass(type(old.owner), CONTAINERS)
    for key in {**old.entries, **new.entries}:
        was, is_now = old.entries.get(key, _MISSING), new.entries.get(key, _MISSING)
        if was is is_now or (may_grow and (was is _MISSING or is_now is _MISSING)):
            continue
        here = (*way, (old.owner, key))
        if id(was) in before and id(is_now) in now and type(was) is type(is_now):
            yield from _compare(before, now, names, (before[id(was)], now[id(is_now)]), here, seen)
        elif _is_told_apart(was, is_now):
            told = f"{_told(was)} -> {_told(is_now)}"
            yield Change(old.owner, _path(here, names), told, _steps(here), tuple(owner for owner, _ in here))


def _is_told_apart(was: Any, now: Any) -> bool:
    if _is_plain(was) and _is_plain(now):
        return type(was) is not type(now) or not (was == now or (was != was and now != now))
    return any(map(_is_plain, (was, now))) or any(issubclass(type(value), torch.Tensor | Enum) for value in (was, now))


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or value is _MISSING or (type(value) is tuple and all(map(_is_plain, value)))


def _told(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    if _is_plain(value) or isinstance(value, Enum):
        said = repr(value)
        return said if len(said) <= 40 else f"{said[:37]}..."
    return f"a tensor {describe(value)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _way_to(nodes: Mapping[int, Node], node: Node) -> tuple[tuple[object, Any], ...]:
    way: list[tuple[object, Any]] = []
    while node.came is not None:
        around, key = node.came
        node = nodes[around]
        way.append((node.owner, key))
    return tuple(reversed(way))


def _steps(way: Iterable[tuple[object, Any]]) -> tuple[Step, ...]:
    return tuple((id(owner), key) for owner, key in way)


def _path(way: tuple[tuple[object, Any], ...], names: Mapping[int, str]) -> str:
    path, begins = "", False
    for owner, key in reversed(way):
        part, begins = label(owner, key, names)
        path = part + path
        if begins:
            return path
    return f"{type(way[0][0]).__name__}{path}"
