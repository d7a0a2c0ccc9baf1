"""How a break's result crosses into the next segment: fixed addresses, filled with the fresh result at every replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from breakgraph.errors import BreakResultError, ResultMismatchError
from breakgraph.graph.device import Pool
from breakgraph.graph.eager_break import BreakSpec
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


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte address of the elements."""
    if tensor.numel() == 0:
        return (tensor.data_ptr(), tensor.data_ptr())
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def overlaps(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tensors share a byte. Views interleaved in one range (chunks of a row) do not."""
    (start, end), (other_start, other_end) = extent(one), extent(other)
    if start >= other_end or other_start >= end:
        return False
    low = min(start, other_start)
    touched = torch.zeros(max(end, other_end) - low, dtype=torch.uint8)

    def cells(tensor: torch.Tensor) -> torch.Tensor:
        item = tensor.element_size()
        size, stride = (*tensor.shape, item), (*(s * item for s in tensor.stride()), 1)
        return touched.as_strided(size, stride, tensor.data_ptr() - low)

    cells(one).fill_(1)
    return bool(cells(other).any())


def geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors exactly when they show the same elements."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape are laid out alike; strides of dimensions of size 1 mean nothing."""
    if one.stride() == other.stride():
        return True
    return all(a == b or n == 1 for a, b, n in zip(one.stride(), other.stride(), one.shape, strict=True))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may reach one element (expanded tensors, sliding windows)."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


class ConstantLeaf:
    """A non-tensor result: must be the same at every replay, since Python after the break does not run again."""

    nbytes = 0

    def __init__(self, path: str, value: object) -> None:
        self.path = path
        self.value = value

    def store(self, value: object, valid: int | None) -> None:
        is_same = value == self.value or (value != value and self.value != self.value)  # NaN is the same constant
        if not is_same or type(value) is not type(self.value):
            raise ResultMismatchError(
                f"{self.path} was {self.value!r} when the plan was captured and is {value!r} now: code after the break "
                "was captured with the old value; return a tensor, or keep the decision inside the break"
            )


class ArgumentLeaf:
    """A result that is an argument, written in place: the next segment reads it where it lies."""

    nbytes = 0

    def __init__(self, path: str, argument: torch.Tensor) -> None:
        self.path = path
        self._argument = argument
        self._geometry = geometry(argument)

    def store(self, value: object, valid: int | None) -> None:
        if value is self._argument or (isinstance(value, torch.Tensor) and geometry(value) == self._geometry):
            return
        raise ResultMismatchError(
            f"{self.path} was an argument that the break wrote in place when the plan was captured, and is "
            f"{describe(value)} now; return the same argument at every run"
        )


class BoundaryBuffer:
    """A fixed-address tensor for one fresh result.

    Allocated at the head of the segment that follows, with the result's strides; once that segment is closed it is held
    as a non-owning view. Owned by: its plan.
    """

    def __init__(self, path: str, result: torch.Tensor, spec: BreakSpec) -> None:
        self.path = path
        self.nbytes = result.numel() * result.element_size()
        self.view = result
        self._spec = spec

    def allocate(self) -> torch.Tensor:
        """The buffer, from the segment that is open now."""
        result = self.view
        self.view = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
        return self.view

    def detach_from(self, pool: Pool) -> None:
        """Stop keeping the pool block alive: from here liveness is the allocator's business."""
        self.view = view_of(self.view, pool)

    def store(self, value: object, valid: int | None) -> None:
        view = self.view
        if not isinstance(value, torch.Tensor) or value.dtype != view.dtype or value.device != view.device:
            raise self._mismatch(value)
        value = value.detach()
        has_rows = valid is not None and view.dim() > self._spec.row_dim
        if value.shape == view.shape and same_strides(value, view):
            view.copy_(value)
            if valid is not None and has_rows:
                self._spec.define_tail(view, valid)
            return
        if valid is None or not has_rows or not self._is_prefix(value, valid):
            raise self._mismatch(value)
        self._spec.check_rows(view, valid)
        view.narrow(self._spec.row_dim, 0, valid).copy_(value)
        self._spec.define_tail(view, valid)

    def _is_prefix(self, value: torch.Tensor, valid: int) -> bool:
        expected = list(self.view.shape)
        expected[self._spec.row_dim] = valid
        return list(value.shape) == expected

    def _mismatch(self, value: object) -> ResultMismatchError:
        return ResultMismatchError(
            f"{self.path} was {describe(self.view)} when the plan was captured and is {describe(value)} now; return "
            "the same shape, strides, dtype and device at every run, or declare a row prefix with valid_rows="
        )


ResultLeaf = ConstantLeaf | ArgumentLeaf | BoundaryBuffer


class ResultStore:
    """All leaves of one break's result, and how they are checked and stored at a replay."""

    def __init__(
        self, spec: BreakSpec, result: Tree, arguments: Sequence[torch.Tensor], mutated: Sequence[int]
    ) -> None:
        """Decide how each leaf of ``result`` crosses. Nothing is allocated yet.

        Args:
            spec: The break's declaration.
            result: What its first run returned.
            arguments: The tensors it was given.
            mutated: Which of them it may write.

        Raises:
            BreakResultError: a result that cannot be carried over.
        """
        self._spec = spec
        self._structure = tree_structure(result)
        self._result: Tree = result
        self._sources: list[int] = []  # index of the argument, for an ArgumentLeaf
        self._leaves: list[ResultLeaf] = []
        fresh: dict[tuple[Any, ...], tuple[torch.Tensor, BoundaryBuffer]] = {}
        for path, leaf in tree_leaves(result, f"{spec.name} result"):
            if isinstance(leaf, torch.Tensor) and is_scattered(leaf):
                raise BreakResultError(
                    f"{path} is a {layout_of(leaf)} tensor, whose memory a plan cannot hold; return to_dense() of it"
                )
            source = _matching_argument(leaf, path, arguments, mutated)
            self._sources.append(source)
            if source >= 0:
                self._leaves.append(ArgumentLeaf(path, arguments[source]))
            elif not isinstance(leaf, torch.Tensor):
                if not is_constant(leaf):
                    raise BreakResultError(f"{path} is {describe(leaf)}; return tensors, constants or trees of them")
                self._leaves.append(ConstantLeaf(path, leaf))
            else:
                key = geometry(leaf)
                if key not in fresh:
                    _check_carriable(leaf, path, fresh.values())
                    fresh[key] = (leaf, BoundaryBuffer(path, leaf, spec))
                self._leaves.append(fresh[key][1])

    def allocate(self, originals: Sequence[torch.Tensor]) -> Tree:
        """At the head of a segment: allocate the boundaries; returns what the captured code gets as the result.

        Args:
            originals: The arguments as the captured code knows them.
        """
        made: dict[int, torch.Tensor] = {}
        remaining = iter(zip(self._leaves, self._sources, strict=True))

        def carry(value: Any, path: str) -> Any:
            leaf, source = next(remaining)
            if isinstance(leaf, BoundaryBuffer):
                if id(leaf) not in made:
                    made[id(leaf)] = leaf.allocate()
                return made[id(leaf)]
            return originals[source] if source >= 0 else value

        carried = tree_map(carry, self._result)
        return carried

    def detach_from(self, pool: Pool) -> list[torch.Tensor]:
        """After that segment was closed: let go of the pool blocks; returns the boundaries as views."""
        for boundary in self.boundaries:
            boundary.detach_from(pool)
        return [boundary.view for boundary in self.boundaries]

    def fill_first(self) -> None:
        """Store the first run's result, which was kept until the boundaries could be written."""
        result, self._result = self._result, None
        self.store(result, ())

    @property
    def boundaries(self) -> list[BoundaryBuffer]:
        """The buffers among the leaves, each once."""
        return list({id(b): b for b in self._leaves if isinstance(b, BoundaryBuffer)}.values())

    def store(self, result: Tree, mutated: Sequence[torch.Tensor]) -> None:
        """Check ``result`` against the captured one and copy what is fresh into its boundary.

        Raises:
            ResultMismatchError: it differs in structure, shape, strides, dtype, device or constant value.
        """
        spec = self._spec
        for tensor in mutated:
            if tensor.requires_grad:  # the break wrote it with history, which the next segment must not carry on
                tensor.detach_()
        valid = None if spec.valid_rows is None else spec.valid_rows()
        if valid is not None:
            for tensor in mutated:
                spec.define_tail(tensor, valid)
        if self._structure is None and (isinstance(result, torch.Tensor) or is_constant(result)):
            self._leaves[0].store(result, valid)
            return
        if tree_structure(result) != self._structure:
            raise ResultMismatchError(
                f"{spec.name} returned {type(result).__name__} of another structure than when the plan was captured; "
                "return the same containers with the same keys at every run"
            )
        for leaf, (_, value) in zip(self._leaves, tree_leaves(result), strict=True):
            leaf.store(value, valid)


def with_bits_of(tensor: torch.Tensor, bare: torch.Tensor) -> torch.Tensor:
    """``bare`` with the lazy conjugation and negation that ``tensor`` carries."""
    if tensor.is_conj():
        bare = bare.conj()
    return torch._neg_view(bare) if tensor.is_neg() else bare


def view_of(tensor: torch.Tensor, pool: Pool) -> torch.Tensor:
    """``tensor`` on the same bytes, not keeping its pool block alive."""
    storage = pool.view_storage(tensor.untyped_storage())
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    bare.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return with_bits_of(tensor, bare)


def _matching_argument(
    leaf: Any, path: str, arguments: Sequence[torch.Tensor], mutated: Sequence[int]
) -> int:  # fmt: skip
    """Index of the argument that a result is; -1 when it is fresh."""
    if not isinstance(leaf, torch.Tensor):
        return -1
    for index in mutated:
        if geometry(leaf) == geometry(arguments[index]):
            return index
    if any(leaf is argument or overlaps(leaf, argument) for argument in arguments):
        raise BreakResultError(
            f"{path} overlaps an argument of the break; return that argument itself and name it in mutates=, or return "
            "a clone"
        )
    return -1


def _check_carriable(
    leaf: torch.Tensor, path: str, others: Iterable[tuple[torch.Tensor, BoundaryBuffer]]
) -> None:  # fmt: skip
    if overlaps_itself(leaf):
        raise BreakResultError(f"{path} overlaps itself ({describe(leaf)}); return .contiguous() of it")
    for other, boundary in others:
        if overlaps(leaf, other):
            raise BreakResultError(f"{path} and {boundary.path} overlap; return a clone of one of them")
