"""A call that a trace does not look into: how it is made again, and what it has to return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from breakgraph.errors import CaptureError
from breakgraph.graph.boundary import geometry
from breakgraph.graph.tree import Tree, describe, tree_leaves, tree_map, tree_structure

Template = tuple[Any, ...]
"""A result in words that Dynamo can read: what the traced code builds its own from."""


class Slot:
    """In the place of a tensor: its number among the tensors of a tree. A leaf, hence no dataclass."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """One call that is not looked into.

    Attributes:
        name: For errors.
        call: Takes the arguments; None where nothing is to be run.
        args: Positional ones, slots in the place of their tensors.
        kwargs: The others, likewise.
        result: What was returned.
        structure: The containers of that.
        leaves: What each leaf of it has to be: a slot for a tensor that was given, the look of another tensor, or the
            constant.
        fresh: Which leaves of that are tensors that were not given.
        looks: Shape, strides and dtype of those.
        device: Where they are.
    """

    name: str
    call: Callable[[Sequence[Any], dict[str, Any]], Tree] | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Template
    structure: Any
    leaves: tuple[Any, ...]
    fresh: tuple[int, ...]
    looks: tuple[Template, ...]
    device: str

    def samples(self) -> list[torch.Tensor]:
        """Tensors without memory that look like the fresh ones."""
        return [torch.empty_strided(*look[:2], dtype=look[2], device="meta") for look in self.looks]

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Make the call on these tensors; the fresh ones of its result.

        Raises:
            CaptureError: containers, constants or shapes are other ones than in the run before the trace.
        """
        if self.call is None:
            return ()

        def fill(leaf: Any, _: str) -> Any:
            return tensors[leaf.index] if isinstance(leaf, Slot) else leaf

        args, kwargs = tree_map(fill, list(self.args)), tree_map(fill, dict(self.kwargs))
        result = self.call(args, kwargs)
        self._check(result, tensors)
        leaves = [leaf for _, leaf in tree_leaves(result)]
        return tuple(leaves[index] for index in self.fresh)

    def _check(self, result: Tree, tensors: Sequence[torch.Tensor]) -> None:
        """Traced code was made for the noted result, constants and all: any other one is refused."""
        if structure_of(result) != self.structure:
            raise self._changed(f"{type(result).__name__} of another structure")
        for (path, leaf), noted in zip(tree_leaves(result), self.leaves, strict=True):
            if not _is_as_noted(leaf, noted, tensors):
                raise self._changed(describe(leaf) + (f" at {path}" if path else ""))

    def _changed(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.name} returned {what}, which is not what it returned before the forward was traced; a captured "
            "function must do the same at every call"
        )


def structure_of(result: Tree) -> Any:
    """Its containers, those of a kind that a capture does not build again (subclasses of list) as what it builds."""
    return tree_structure(tree_map(lambda leaf, _: leaf, result))


def look_of(tensor: torch.Tensor) -> Template:
    """Shape, strides and dtype."""
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def noted_leaf(leaf: Any, places: Mapping[Any, int]) -> Any:
    """See :attr:`OpaqueCall.leaves`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    key = geometry(leaf)
    return Slot(places[key]) if key in places else look_of(leaf)


def _is_as_noted(leaf: Any, noted: Any, tensors: Sequence[torch.Tensor]) -> bool:
    if not isinstance(leaf, torch.Tensor):
        is_same = leaf == noted or (leaf != leaf and noted != noted)  # NaN is the same constant
        return type(leaf) is type(noted) and is_same
    if isinstance(noted, Slot):
        given = tensors[noted.index]
        is_empty = leaf.numel() == 0  # lies nowhere
        return look_of(leaf) == look_of(given) if is_empty else geometry(leaf) == geometry(given)
    return isinstance(noted, tuple) and look_of(leaf) == noted
