"""Every module of the process: found through the garbage collector, and those that `gc.freeze` hid from it too."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import Any

import torch


class _Mark:
    """Made when the heap was walked. While the collector shows it, nothing was frozen since."""


_NUM_AT_ONCE = 4096
_mark: _Mark | None = None
_frozen: list[weakref.ref[torch.nn.Module]] = []


def all_modules(fn: object = None) -> list[torch.nn.Module]:
    """Those alive, garbage included.

    Where something was frozen since the last time, whatever can be reached from imported modules and from objects that
    are not frozen is walked once, which takes seconds in a large process.

    Args:
        fn: Frozen modules that it uses are found too, though nobody but a local variable may hold it.
    """
    kinds = _module_types()
    objects = gc.get_objects()
    found = _of_types(objects, kinds | {_Mark})
    modules = [item for item in found if item is not _mark]
    if not gc.get_freeze_count():
        return modules
    if len(modules) == len(found):
        _remember(_of_types(_walk([sys.modules, *objects]), kinds))
    remembered = [module for reference in _frozen if (module := reference()) is not None]
    used = _of_types(_walk([fn], _namespaces()), kinds)
    return list({id(module): module for module in modules + remembered + used}.values())


def _remember(modules: Iterable[torch.nn.Module]) -> None:
    global _mark, _frozen
    _frozen = [weakref.ref(module) for module in modules]
    _mark = _Mark()


def _walk(roots: Sequence[Any], without: Collection[int] = ()) -> list[Any]:
    """``roots`` and what can be reached from them, but not through objects of these identities."""
    seen, found, wave = {*without, *map(id, roots)}, list(roots), list(roots)
    while wave:
        batches = (wave[start : start + _NUM_AT_ONCE] for start in range(0, len(wave), _NUM_AT_ONCE))
        referents = [item for batch in batches for item in gc.get_referents(*batch)]
        fresh = {id(item): item for item in compress(referents, map(gc.is_tracked, referents)) if id(item) not in seen}
        seen |= fresh.keys()
        wave = list(fresh.values())
        found += wave
    return found


def _namespaces() -> set[int]:
    """What every function leads to, and a walk from one function need not enter."""
    modules = list(sys.modules.values())
    return {id(item) for item in modules} | {id(vars(item)) for item in modules if isinstance(item, types.ModuleType)}


def _module_types() -> set[type]:
    kinds: set[type] = set()
    waiting: list[type] = [torch.nn.Module]
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += kind.__subclasses__()
    return kinds


def _of_types(objects: Sequence[Any], kinds: set[type]) -> list[Any]:
    """Without a step of Python for each object: there are a million."""
    return list(compress(objects, map(kinds.__contains__, map(type, objects))))
