"""What a plan was captured with: which tensors modules held, where they lay, in which mode the modules were."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch

from breakgraph.errors import StalePlanError
from breakgraph.graph.eager_break import is_break
from breakgraph.graph.heap import all_modules
from breakgraph.graph.side_effects import Attribute
from breakgraph.graph.tree import describe, tree_leaves

_WAY_OUT = "update tensors in place, put modes back, or call invalidate() and capture again"
_data_ptr = torch.Tensor.data_ptr
_training = itemgetter("training")
_values = dict.values
_WITHOUT_MODES = (
    torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Conv1d, torch.nn.Conv2d,
    torch.nn.Identity, torch.nn.ReLU, torch.nn.SiLU, torch.nn.GELU, torch.nn.ModuleList, torch.nn.ModuleDict,
    torch.nn.Sequential,
)  # fmt: skip
"""Compute the same in training and in evaluation. Classes derived from them may not."""


def _lie_one_by_one(tensors: list[torch.Tensor], addresses: list[int], indices: list[int]) -> bool:
    return list(map(_data_ptr, tensors)) == addresses


# Builds of torch with CUDA have a comparison in C++.
_lie_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _lie_one_by_one)


class Slot(NamedTuple):
    """Where a module holds a tensor."""

    owner: torch.nn.Module
    table: dict[str, Any]
    name: str


class ModuleIndex:
    """Which modules of the process hold which storages. Owned by: a plan family, so that the search, which asks the
    garbage collector, is made once for all plans on the same weights."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._slots: dict[int, list[Slot]] = {}
        self._chains: dict[int, list[torch.nn.Module]] = {}

    def clear(self) -> None:
        """Forget everything: storages are gone, or will be."""
        self._known, self._slots, self._chains = set(), {}, {}

    def slots_of(self, storages: set[int], fn: object) -> list[Slot]:
        """Where modules hold tensors in ``storages``, which ``fn`` read."""
        if not storages <= self._known:
            self._search(storages, fn)
        return [slot for storage in storages for slot in self._slots.get(storage, ())]

    def chain(self, owner: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules around one that was found, outermost first, and itself."""
        return self._chains[id(owner)]

    def _search(self, storages: set[int], fn: object) -> None:
        modules, self._known, self._slots = all_modules(fn), self._known | storages, {}
        for module in modules:
            for storage, slot in _slots_on(module, self._known):
                self._slots.setdefault(storage, []).append(slot)
        parents = _parents(modules)
        owners = [slot.owner for slots in self._slots.values() for slot in slots]
        self._chains = {id(owner): _chain(owner, parents) for owner in owners}


class StaticInputs:
    """Where the tensors lay that a callable was captured with. Compared at every replay.

    Args:
        inputs: What it was called with.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        found = [
            (path, leaf) for path, leaf in tree_leaves(list(inputs), "static input ")
            if isinstance(leaf, torch.Tensor) and _storage_with_address(leaf)
        ]  # fmt: skip
        self._paths = [path for path, _ in found]
        self._tensors = [tensor for _, tensor in found]
        self._looks = [describe(tensor) for tensor in self._tensors]
        self._addresses = list(map(_data_ptr, self._tensors))
        self._indices = list(range(len(found)))

    def check(self) -> None:
        """Compare with now.

        Raises:
            StalePlanError: the memory behind an input is another one (``x.data = ...``).
        """
        if _lie_at(self._tensors, self._addresses, self._indices):
            return
        for path, tensor, look, address in zip(self._paths, self._tensors, self._looks, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                raise StalePlanError(
                    f"{path} was {look} and is {describe(tensor)} in other memory, where no replay looks; copy new "
                    "values into it (copy_), or capture again"
                )


class Fingerprint:
    """Of the modules whose tensors a plan's segments read. Found once, after the capture; compared at every replay.

    An update in place is not noticed and need not be: graphs read the same memory. What was pinned cannot be given to
    another tensor, so that an address tells whether a tensor was replaced.

    A plain attribute that the function itself sets, a table kept for the last length, say, may change: the plan keeps
    the tensor that it was captured with.

    Args:
        fn: What was captured.
        pins: Storages outside the pool that the plan reads.
        index: Finds the modules that hold them.
        own: Attributes that the function was seen to set. None: nobody looked, and it may be any.
        version: The user's own version token of what no module shows; None if there is none.
        token: What it gave when the capture began.
    """

    def __init__(
        self,
        fn: object,
        pins: Iterable[torch.UntypedStorage],
        index: ModuleIndex,
        own: Collection[Attribute] | None = None,
        version: Callable[[], object] | None = None,
        token: object = None,
    ) -> None:
        self._version = version
        self._token = token
        slots = index.slots_of({pin._cdata for pin in pins}, fn)
        self._slots = [slot for slot in slots if not _is_own(slot, own)]
        self._tables = [slot.table for slot in self._slots]
        self._names = [slot.name for slot in self._slots]
        self._tensors: list[torch.Tensor] = list(map(getitem, self._tables, self._names))
        self._looks = [describe(tensor) for tensor in self._tensors]
        self._addresses = list(map(_data_ptr, self._tensors))
        self._indices = list(range(len(self._tensors)))
        owners = {id(slot.owner): slot.owner for slot in self._slots}.values()
        chains = [index.chain(owner) for owner in owners]
        self._parents = _with_lasting_children(chains, own)
        self._families = [parent._modules for parent in self._parents]
        self._children = [dict(family) for family in self._families]
        self._sizes_and_children = self._look_at_children()
        moded = _with_modes(chains)
        # Modules of TorchScript keep their flag elsewhere, and are asked.
        self._scripted = [module for module in moded if "training" not in module.__dict__]
        plain = [module for module in moded if "training" in module.__dict__]
        self._moded, self._attributes = plain + self._scripted, [module.__dict__ for module in plain]
        self._flags = self._modes()

    def check(self) -> None:
        """Compare with now.

        Raises:
            StalePlanError: a tensor was replaced or moved, a module has other modules in it or changed between training
                and evaluation, or the version token differs.
        """
        is_same = self._has_same_tensors() and self._modes() == self._flags
        if not is_same or self._look_at_children() != self._sizes_and_children:
            raise StalePlanError(f"{self._difference()}; {_WAY_OUT}")
        if self._version is not None and (token := self._version()) != self._token:
            raise StalePlanError(f"version= gave {self._token!r} at the capture and gives {token!r} now; {_WAY_OUT}")

    def _modes(self) -> list[bool]:
        flags = list(map(_training, self._attributes))
        return flags + [module.training for module in self._scripted] if self._scripted else flags

    def _look_at_children(self) -> list[Any]:
        """How many there are in each module, and all of them. Lists compare what they hold by identity first."""
        return [*map(len, self._families), *itertools.chain.from_iterable(map(_values, self._families))]

    def _has_same_tensors(self) -> bool:
        try:
            if not all(map(is_, map(getitem, self._tables, self._names), self._tensors)):
                # Other objects may still be the same memory: those of a module that was put together again.
                now = list(map(getitem, self._tables, self._names))
                if list(map(_data_ptr, now)) != self._addresses:
                    return False
                self._tensors = now
        except (KeyError, TypeError):  # removed, or None now
            return False
        return _lie_at(self._tensors, self._addresses, self._indices)

    def _difference(self) -> str:
        parents = _parents(all_modules())
        for slot, look, address in zip(self._slots, self._looks, self._addresses, strict=True):
            now = dict(slot.table.items()).get(slot.name)  # TorchScript's tables have no `get`
            if not isinstance(now, torch.Tensor) or now.data_ptr() != address:
                return f"{_path(slot.owner, parents)}.{slot.name} was {look} and is {describe(now)} in other memory"
        for module, flag in zip(self._moded, self._flags, strict=True):
            if module.training != flag:
                words = ("training", "evaluation") if flag else ("evaluation", "training")
                return f"module {_path(module, parents)} was in {words[0]} mode and is in {words[1]} mode"
        for parent, family, known in zip(self._parents, self._families, self._children, strict=True):
            for name in dict.fromkeys([*known, *family]):
                before, now = known.get(name), family.get(name)
                if before is not now:
                    told = [f"{type(child).__name__}" if child is not None else "nothing" for child in (before, now)]
                    another = "another " if told[0] == told[1] else ""
                    return f"module {_path(parent, parents)}.{name} was {told[0]} and is {another}{told[1]}"
            if list(known) != list(family):
                return f"the modules in {_path(parent, parents)} have another order"
        raise AssertionError("the fingerprint differs and no part of it does")


def _is_own(slot: Slot, own: Collection[Attribute] | None) -> bool:
    is_plain = slot.table is slot.owner.__dict__
    return is_plain and (own is None or Attribute(slot.owner, slot.name) in own)


def _with_lasting_children(
    chains: Sequence[Sequence[torch.nn.Module]], own: Collection[Attribute] | None
) -> list[torch.nn.Module]:  # fmt: skip
    """The modules around owners, themselves included, without those whose children the function itself replaces."""
    modules = {id(module): module for chain in chains for module in chain if type(module._modules) is dict}
    changing = {id(attribute.owner) for attribute in own or () if isinstance(attribute.owner, torch.nn.Module)}
    return [module for key, module in modules.items() if module._modules and key not in changing]


def _parents(modules: Iterable[torch.nn.Module]) -> dict[int, tuple[torch.nn.Module, str]]:
    """A module around each, and its name there. One that is still being made has no children yet."""
    parents: dict[int, tuple[torch.nn.Module, str]] = {}
    for module in modules:
        for name, child in list(module.__dict__.get("_modules", {}).items()):
            if child is not None:
                parents.setdefault(id(child), (module, name))
    return parents


def _chain(
    module: torch.nn.Module, parents: dict[int, tuple[torch.nn.Module, str]]
) -> list[torch.nn.Module]:  # fmt: skip
    chain = [module]
    while id(chain[-1]) in parents and parents[id(chain[-1])][0] not in chain:
        chain.append(parents[id(chain[-1])][0])
    return chain[::-1]


def _path(module: torch.nn.Module, parents: dict[int, tuple[torch.nn.Module, str]]) -> str:
    chain = _chain(module, parents)
    return ".".join([type(chain[0]).__name__, *(parents[id(inner)][1] for inner in chain[1:])])


def _slots_on(module: torch.nn.Module, storages: set[int]) -> Iterator[tuple[int, Slot]]:
    """The tensors in ``storages`` that one module holds."""
    attributes = module.__dict__
    tables: list[dict[str, Any]] = [attributes.get("_parameters", {}), attributes.get("_buffers", {}), attributes]
    for table in tables:
        for name, value in list(table.items()):  # other threads may be making modules
            # By its type alone: proxies for what is not there yet fail when isinstance asks them.
            storage = _storage_with_address(value) if issubclass(type(value), torch.Tensor) else None
            if storage in storages:
                yield storage, Slot(module, table, name)


def _storage_with_address(tensor: torch.Tensor) -> int:
    try:
        tensor.data_ptr()
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # a wrapper subclass has no address
        return 0


def _with_modes(chains: Sequence[Sequence[torch.nn.Module]]) -> list[torch.nn.Module]:
    """The modules whose training flag may matter: those of the smallest container of all owners in one model.

    What lies inside breaks is left out: it is asked anew at every replay.
    """
    common: dict[int, Sequence[torch.nn.Module]] = {}  # by the outermost module: the chain that its owners share
    for chain in chains:
        shared = common.setdefault(id(chain[0]), chain)
        common[id(chain[0])] = [one for one, other in zip(shared, chain, strict=False) if one is other]
    found: dict[int, torch.nn.Module] = {}
    for chain in common.values():
        is_leaf = not chain[-1]._modules and len(chain) > 1  # a dropout beside it counts
        _add_outside_breaks(chain[-2] if is_leaf else chain[-1], found)
    return list(found.values())


def _add_outside_breaks(module: torch.nn.Module, found: dict[int, torch.nn.Module]) -> None:
    if is_break(module.forward) or id(module) in found:
        return
    if not _is_without_modes(module):
        found[id(module)] = module
    for child in module.children():
        _add_outside_breaks(child, found)


def _is_without_modes(module: torch.nn.Module) -> bool:
    is_changed = module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__
    return type(module) in _WITHOUT_MODES and not is_changed
