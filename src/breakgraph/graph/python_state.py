"""Which plain Python values a call changed that it may read again: a replay runs no Python and goes on with the old."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

import torch

from breakgraph.graph.side_effects import is_a, is_equal, safely
from breakgraph.graph.state_walk import CONTAINERS, MOST_NODES, Node, entries_of, is_plain, label, walk
from breakgraph.graph.tree import describe

_MISSING: Any = object()
_MOST_PARTS = 20
"""Of a path, for a person."""
Step = tuple[int, Any]
"""From an object, by identity, to what it holds under a key."""
_Way = tuple["_Way | None", object, Any]
"""The way to an object, and from it to what it holds under a key."""


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

    @property
    def is_cut(self) -> bool:
        """Whether there is more than is looked at."""
        return len(self._before) >= MOST_NODES

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
        """Watch the objects on the way to these in :meth:`allowing`, where a break may put others; returns whether one
        may have done so unseen."""
        around = [owner for change in changes for owner in change.around]
        fresh = {id(owner): owner for owner in around if id(owner) not in self._suspects}
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


def one_of_a_kind(changes: Iterable[Change]) -> list[Change]:
    """Of changes under several keys of one container, which else are alike, the first; it tells how many there are."""
    alike: dict[Any, list[Change]] = {}
    for change in changes:
        places = [place for place, owner in enumerate(change.around) if issubclass(type(owner), CONTAINERS)]
        last = places[-1] if places else None
        module = next((id(owner) for owner in reversed(change.around) if is_a(owner, torch.nn.Module)), None)
        rest = tuple(key for _, key in change.way[last + 1 :]) if last is not None else change.way
        alike.setdefault((None if last is None else id(change.around[last]), rest, module), []).append(change)
    return [
        first if not others else first._replace(told=f"{first.told}, and {len(others)} more like it")
        for first, *others in alike.values()
    ]


def _differences(
    before: Mapping[int, Node], now: Mapping[int, Node], names: Mapping[int, str]
) -> Iterator[Change]:  # fmt: skip
    seen: set[tuple[int, int]] = set()
    for ident, old in before.items():
        new = now.get(ident)
        if new is not None and not _holds_same(old, new):
            yield from _compare(before, now, names, (old, new, _way_to(before, old)), seen)


def _holds_same(old: Node, new: Node) -> bool:
    """At a glance."""
    return old.entries.keys() == new.entries.keys() and all(map(is_, old.entries.values(), new.entries.values()))


def _compare(
    before: Mapping[int, Node], now: Mapping[int, Node], names: Mapping[int, str], pair: tuple[Node, Node, _Way | None],
    seen: set[tuple[int, int]],
) -> Iterator[Change]:  # fmt: skip
    waiting = [pair]
    while waiting:
        old, new, way = waiting.pop()
        if (id(old.owner), id(new.owner)) in seen:
            continue
        seen.add((id(old.owner), id(new.owner)))
        may_grow = not old.is_near and issubclass(type(old.owner), CONTAINERS)
        inner = []
        for key in {**old.entries, **new.entries}:
            was, is_now = old.entries.get(key, _MISSING), new.entries.get(key, _MISSING)
            if was is is_now or (may_grow and (was is _MISSING or is_now is _MISSING)):
                continue
            here = (way, old.owner, key)
            if id(was) in before and id(is_now) in now and type(was) is type(is_now):
                inner.append((before[id(was)], now[id(is_now)], here))
            elif _is_told_apart(was, is_now):
                yield _change(here, f"{_told(was)} -> {_told(is_now)}", names)
        waiting += reversed(inner)


def _is_told_apart(was: Any, now: Any) -> bool:
    is_value = _is_value(was), _is_value(now)
    if all(is_value):
        return type(was) is not type(now) or not (is_equal(was, now) or not (is_equal(was, was) or is_equal(now, now)))
    return any(is_value) or any(issubclass(type(value), torch.Tensor | Enum) for value in (was, now))


def _is_value(value: Any) -> bool:
    return value is _MISSING or is_plain(value)


def _told(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    if is_plain(value) or isinstance(value, Enum):
        said = safely(repr, value, f"a {type(value).__name__}")
        return said if len(said) <= 40 else f"{said[:37]}..."
    return f"a tensor {describe(value)}" if issubclass(type(value), torch.Tensor) else f"a {type(value).__name__}"


def _way_to(nodes: Mapping[int, Node], node: Node) -> _Way | None:
    steps: list[tuple[object, Any]] = []
    while node.came is not None:
        around, key = node.came
        node = nodes[around]
        steps.append((node.owner, key))
    way: _Way | None = None
    for owner, key in reversed(steps):
        way = (way, owner, key)
    return way


def _change(way: _Way, told: str, names: Mapping[int, str]) -> Change:
    steps: list[tuple[object, Any]] = []
    rest: _Way | None = way
    while rest is not None:
        rest, owner, key = rest
        steps.append((owner, key))
    steps.reverse()
    around = tuple(owner for owner, _ in steps)
    return Change(around[-1], _path(steps, names), told, tuple((id(owner), key) for owner, key in steps), around)


def _path(way: Sequence[tuple[object, Any]], names: Mapping[int, str]) -> str:
    parts: list[str] = []
    for owner, key in reversed(way):
        part, begins = label(owner, key, names)
        parts.append(part)
        if begins:
            break
    else:
        parts.append(type(way[0][0]).__name__)
    if len(parts) > _MOST_PARTS:
        parts[_MOST_PARTS // 2 : -_MOST_PARTS // 2] = ["..."]
    return "".join(reversed(parts))
