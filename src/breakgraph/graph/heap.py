"""Every module of the process: found through the garbage collector, and those that `gc.freeze` hid from it too."""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch


class _Mark:
    """Made when it was found out what is frozen. While the collector shows it, nothing was frozen since."""


_NUM_AT_ONCE = 4096
_LONG_SEC = 0.2
_lock = threading.RLock()
_mark: _Mark | None = None
_frozen: list[weakref.ref[torch.nn.Module]] | None = None
"""None: nothing is."""


def all_modules(fn: object = None) -> list[torch.nn.Module]:
    """Those alive, garbage included.

    Where something was frozen since the last time, whatever can be reached from imported modules and from objects that
    are not frozen is walked once, which takes a while in a large process.

    Args:
        fn: Frozen modules that it uses are found too, though nobody but a local variable may hold it.
    """
    kinds = _types_of(torch.nn.Module)
    with undisturbed():
        objects = gc.get_objects()
        found = _of_types(objects, kinds | {_Mark})
        modules = [item for item in found if item is not _mark]
        if len(modules) == len(found):
            remember(_of_types(_walk([sys.modules, *objects]), kinds) if gc.get_freeze_count() else None)
        del objects
    if _frozen is None:
        return modules
    remembered = [module for reference in _frozen if (module := reference()) is not None]
    used = _of_types(_walk([fn], _namespaces(), skipped=(type, types.ModuleType)), kinds)
    return list({id(module): module for module in modules + remembered + used}.values())


def remember(frozen: Iterable[torch.nn.Module] | None) -> None:
    """All modules that are frozen, from somebody who knows: until more is, none need be looked for."""
    global _mark, _frozen
    _frozen = None if frozen is None else [weakref.ref(module) for module in frozen]
    _mark = _Mark()


def _walk(roots: Sequence[Any], without: Collection[int] = (), skipped: tuple[type, ...] = ()) -> list[Any]:
    """``roots`` and what can be reached from them, but not through objects of these identities and types."""
    seen, found, wave = {*without, *map(id, roots)}, list(roots), list(roots)
    while wave:
        batches = (wave[start : start + _NUM_AT_ONCE] for start in range(0, len(wave), _NUM_AT_ONCE))
        referents = [item for batch in batches for item in gc.get_referents(*batch)]
        fresh = {id(item): item for item in compress(referents, map(gc.is_tracked, referents)) if id(item) not in seen}
        seen |= fresh.keys()
        wave = [item for item in fresh.values() if not issubclass(type(item), skipped)]  # proxies answer isinstance
        found += wave
    return found


def _namespaces() -> set[int]:
    """Of imported modules: every function leads there, and a walk from one function need not enter."""
    return {id(vars(item)) for item in list(sys.modules.values()) if issubclass(type(item), types.ModuleType)}


def alive(base: type) -> list[Any]:
    """The objects of a type that the collector shows, and of the types derived from it."""
    with undisturbed():
        return _of_types(gc.get_objects(), _types_of(base))


@contextmanager
def between_walks() -> Iterator[None]:
    """While no other thread has a list of all objects, which holds what it lists."""
    with _lock:
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """While all objects of the process are in a list: other threads had better not meet it.

    One that makes a tuple fails when somebody else holds the half of it, and memory that a second capture has let go of
    is not free while a list of the first has it. So threads take turns less often here, and captures wait for another.
    A walk that takes longer than a turn can still be met.
    """
    with _lock:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_LONG_SEC)
        if threading.active_count() > 1:
            time.sleep(2 * usual)  # whoever waits by now was promised its turn
        try:
            yield
        finally:
            sys.setswitchinterval(usual)


def _types_of(base: type) -> set[type]:
    kinds: set[type] = set()
    waiting: list[type] = [base]
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += kind.__subclasses__()
    return kinds


def _of_types(objects: Sequence[Any], kinds: set[type]) -> list[Any]:
    """Without a step of Python for each object: there are hundreds of thousands."""
    return list(compress(objects, map(kinds.__contains__, map(type, objects))))
