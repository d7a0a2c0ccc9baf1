"""What a plan was captured with: which tensors modules held, where they lay, in which mode the modules were."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from operator import getitem, is_
from typing import Any

import torch

from breakgraph.errors import StalePlanError
from breakgraph.graph.eager_break import is_break
from breakgraph.graph.tree import describe

_WAY_OUT = "update tensors in place, put modes back, or call invalidate() and capture again"
_data_ptr = torch.Tensor.data_ptr


class Fingerprint:
    """Of the modules whose tensors a plan's segments read. Found once, after the capture; compared at every replay.

    An update in place is not noticed and need not be: graphs read the same memory.

    Args:
        pins: Storages outside the pool that the plan reads.
        version: The user's own version token of what no module shows; None if there is none.
        token: What it gave when the capture began.
    """

    def __init__(
        self, pins: Iterable[torch.UntypedStorage], version: Callable[[], object] | None = None, token: object = None
    ) -> None:
        self._modules = _all_modules()
        self._version = version
        self._token = token
        storages = {pin._cdata for pin in pins}
        slots = [slot for module in self._modules for slot in _slots_on(module, storages)]
        self._owners = [module for module, _, _ in slots]
        self._tables = [table for _, table, _ in slots]
        self._names = [name for _, _, name in slots]
        self._tensors: list[torch.Tensor] = list(map(getitem, self._tables, self._names))
        self._looks = [describe(tensor) for tensor in self._tensors]
        self._addresses = list(map(_data_ptr, self._tensors))
        self._moded = _with_modes(self._owners, self._modules)
        self._flags = [module.training for module in self._moded]
        self._attributes = [module.__dict__ for module in self._moded]
        self._modules = []

    def check(self) -> None:
        """Compare with now.

        Raises:
            StalePlanError: a tensor was replaced or moved, a module changed between training and evaluation, or the
                version token differs.
        """
        try:
            is_same = (
                all(map(is_, map(getitem, self._tables, self._names), self._tensors))
                and list(map(_data_ptr, self._tensors)) == self._addresses
                and [attributes["training"] for attributes in self._attributes] == self._flags
            )
        except KeyError:
            is_same = False
        if not is_same:
            raise StalePlanError(f"{self._difference()}; {_WAY_OUT}")
        if self._version is not None and (token := self._version()) != self._token:
            raise StalePlanError(f"version= gave {self._token!r} at the capture and gives {token!r} now; {_WAY_OUT}")

    def _difference(self) -> str:
        self._modules = _all_modules()
        try:
            for index, (owner, table, name) in enumerate(zip(self._owners, self._tables, self._names, strict=True)):
                path = f"{self._path(owner)}.{name}"
                if name not in table:
                    return f"{path} was removed"
                if table[name] is not self._tensors[index]:
                    return f"{path} was replaced: it was {self._looks[index]} and is {describe(table[name])}"
                if table[name].data_ptr() != self._addresses[index]:
                    return f"{path} was moved: it was {self._looks[index]} and is {describe(table[name])}"
            for module, flag in zip(self._moded, self._flags, strict=True):
                if module.training != flag:
                    words = ("training", "evaluation") if flag else ("evaluation", "training")
                    return f"module {self._path(module)} was in {words[0]} mode and is in {words[1]} mode"
            raise AssertionError("the fingerprint differs and no part of it does")
        finally:
            self._modules = []

    def _path(self, module: torch.nn.Module) -> str:
        parts: list[str] = []
        while (parent := _parent(module, self._modules)) is not None:
            name = next(name for name, child in parent._modules.items() if child is module)
            parts.append(name)
            module = parent
        return ".".join([type(module).__name__, *reversed(parts)])


def _all_modules() -> list[torch.nn.Module]:
    return [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]


def _parent(module: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> torch.nn.Module | None:
    for candidate in modules:
        if any(child is module for child in candidate.__dict__.get("_modules", {}).values()):
            return candidate
    return None


def _slots_on(
    module: torch.nn.Module, storages: set[int]
) -> Iterator[tuple[torch.nn.Module, dict[str, Any], str]]:  # fmt: skip
    """Where a module holds tensors that lie in ``storages``."""
    attributes = module.__dict__
    tables: list[dict[str, Any]] = [attributes.get("_parameters", {}), attributes.get("_buffers", {}), attributes]
    for table in tables:
        for name, value in table.items():
            if isinstance(value, torch.Tensor) and _lies_in(value, storages):
                yield module, table, name


def _lies_in(tensor: torch.Tensor, storages: set[int]) -> bool:
    try:
        return tensor.untyped_storage()._cdata in storages and tensor.data_ptr() >= 0
    except RuntimeError:  # a wrapper subclass has no address
        return False


def _with_modes(owners: Iterable[torch.nn.Module], modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules whose training flag may matter: those of the smallest ones that hold all owners of one model.

    What lies inside breaks is left out: it is asked anew at every replay.
    """
    parents: dict[int, torch.nn.Module] = {}
    for module in modules:
        for child in (module.__dict__.get("_modules") or {}).values():
            if child is not None:
                parents.setdefault(id(child), module)
    common: dict[int, list[torch.nn.Module]] = {}  # top module -> the chain that its owners share, outermost first
    for owner in {id(owner): owner for owner in owners}.values():
        chain = [owner]
        while (parent := parents.get(id(chain[-1]))) is not None and parent not in chain:
            chain.append(parent)
        chain.reverse()
        shared = common.setdefault(id(chain[0]), chain)
        common[id(chain[0])] = [one for one, other in zip(shared, chain, strict=False) if one is other]
    found: list[torch.nn.Module] = []
    for chain in common.values():
        _add_outside_breaks(chain[-1], found)
    return found


def _add_outside_breaks(module: torch.nn.Module, found: list[torch.nn.Module]) -> None:
    if is_break(module.forward) or any(module is known for known in found):
        return
    found.append(module)
    for child in module.children():
        _add_outside_breaks(child, found)
