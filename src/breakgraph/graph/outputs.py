"""Where a plan's outputs live: one buffer for a whole family, as large as its largest plan needs."""

from __future__ import annotations

from typing import Any

import torch

from breakgraph.errors import CaptureError
from breakgraph.graph.boundary import overlaps_itself
from breakgraph.graph.tree import (
    Tree,
    describe,
    is_constant,
    is_scattered,
    layout_of,
    tree_leaves,
    tree_map,
    tree_structure,
)

_ALIGNMENT = 512


class OutputBuffer:
    """Shared output memory, outside the pool. Owned by: the plan family.

    All plans of a family write to its head, so an output is valid until any of them replays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._bytes is None else self._bytes.numel()

    def reserve(self, nbytes: int) -> None:
        """Hold at least ``nbytes``. Plans captured earlier keep the buffer that they were captured with."""
        if nbytes > self.nbytes:
            with torch.inference_mode(False):
                self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def place(self, outputs: Tree) -> Tree:
        """A tree like ``outputs`` with every tensor replaced by one in this buffer, of the same shape.

        Strides are kept where elements do not overlap. A plan that needs more than is there gets a larger buffer, which
        later plans share; capture the largest bucket first.
        """
        places: list[tuple[torch.Tensor, int]] = []
        end = 0
        for path, leaf in tree_leaves(outputs, "output"):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.device != self._device:
                raise CaptureError(f"{path} is on {leaf.device}, the capture on {self._device}; return device tensors")
            if is_scattered(leaf):
                raise CaptureError(f"{path} is a {layout_of(leaf)} tensor; return to_dense() of it")
            like = torch.empty_like(leaf, device="meta") if not overlaps_itself(leaf) else leaf.to("meta").contiguous()
            places.append((like, end))
            end += -(-like.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        self.reserve(end)
        remaining = iter(places)

        def place(leaf: Any, path: str) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            like, offset = next(remaining)
            return self._view(like, offset)

        return tree_map(place, outputs)

    def _view(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        assert self._bytes is not None
        with torch.inference_mode(False), torch.no_grad():
            bare = torch.empty(0, dtype=like.dtype, device=self._device)
            storage = self._bytes.untyped_storage()
            return bare.set_(storage, offset // like.element_size(), like.shape, like.stride())

    def close(self) -> None:
        """Let go of the memory."""
        self._bytes = None


def copy_into(places: Tree, outputs: Tree) -> None:
    """Copy the outputs into their places; recorded, when a segment is open.

    Raises:
        CaptureError: the captured run returned other shapes than the warm-up did.
    """
    if tree_structure(places) != tree_structure(outputs):
        raise _changed("the output's structure", type(places).__name__, type(outputs).__name__)
    for (path, place), (_, output) in zip(tree_leaves(places, "output"), tree_leaves(outputs), strict=True):
        if not isinstance(place, torch.Tensor):
            if output is place:
                continue
            if not is_constant(output) or not is_constant(place):
                raise CaptureError(
                    f"{path} is of the type {type(output).__name__}, and each call makes another one, which a replay "
                    "cannot; return tensors, constants, or tuples, lists, dicts or dataclasses of them"
                )
            if type(output) is not type(place) or output != place:
                raise _changed(path, describe(place), describe(output))
        elif not isinstance(output, torch.Tensor) or output.shape != place.shape or output.dtype != place.dtype:
            raise _changed(path, describe(place), describe(output))
        else:
            place.copy_(output.detach())


def _changed(what: str, before: str, now: str) -> CaptureError:
    return CaptureError(
        f"{what} was {before} in the warm-up and is {now} in the capture; a captured function must do the same at "
        "every call"
    )
