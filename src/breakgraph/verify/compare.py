"""Comparing results bit by bit, and saying how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from breakgraph.graph.tree import Tree, tree_leaves

_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that is not what it should be.

    Attributes:
        path: Which one, e.g. ``output['logits']``.
        num_different: Elements whose bits differ, of ``num_elements``.
        max_abs: The largest difference where both are finite; None where nothing can be subtracted.
        relative: The same over the largest expected value.
        num_non_finite: Elements that are NaN or infinite and should not be.
        first_index: The first element that differs.
    """

    path: str
    num_different: int
    num_elements: int
    max_abs: float | None
    relative: float | None
    num_non_finite: int
    first_index: tuple[int, ...]

    def __str__(self) -> str:
        parts = [f"{self.num_different} of {self.num_elements} elements differ, first at {list(self.first_index)}"]
        if self.max_abs is not None:
            parts.append(f"by {self.max_abs:.3g} at most")
        if self.num_non_finite:
            parts.append(f"{self.num_non_finite} are NaN or infinite and should not be")
        return f"{self.path}: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "first_index": list(self.first_index)}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, [numel]; contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit agree; a NaN is equal to itself, 0.0 is not -0.0."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def digest(tensor: Tensor) -> Tensor:
    """[1] int64 that two tensors share, all but surely, only if they have the same bits. Takes little memory."""
    integers = bits(tensor)
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for start in range(0, integers.numel(), _CHUNK):
        part = integers[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + part.numel(), device=tensor.device) * 0x9E3779B1 + 0x7F4A7C15
        total += ((part + 0x51ED27) * (weights ^ (weights >> 15))).sum()
    return total


def difference(got: Tensor, expected: Tensor, path: str) -> Difference | None:
    """None when the bits agree."""
    if same_bits(got, expected):
        return None
    if got.shape != expected.shape or got.dtype != expected.dtype:
        count = max(1, got.numel())
        return Difference(
            path=f"{path}, {_kind(got)} in place of {_kind(expected)}", num_different=count, num_elements=count,
            max_abs=None, relative=None, num_non_finite=0, first_index=(0,) * got.dim(),
        )  # fmt: skip
    differs = (bits(got) != bits(expected)).reshape(got.numel(), -1).any(1)
    first = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape)) if got.dim() else ()
    max_abs, relative = distance(got, expected)
    wrong = ~torch.isfinite(got) & torch.isfinite(expected)
    return Difference(
        path=path, num_different=int(differs.sum()), num_elements=got.numel(), max_abs=max_abs, relative=relative,
        num_non_finite=int(wrong.sum()), first_index=index,
    )  # fmt: skip


def distance(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """The largest difference where both are finite, and the same over the largest finite expected value."""
    wide = torch.complex128 if got.is_complex() else torch.float64
    one, other = got.detach().to(wide), expected.detach().to(wide)
    finite = torch.isfinite(one) & torch.isfinite(other)
    if not bool(finite.any()):
        return 0.0, 0.0
    largest = float((one - other)[finite].abs().max())
    scale = float(other[finite].abs().max())
    return largest, largest / scale if scale else (math.inf if largest else 0.0)


def differences(got: Tree, expected: Tree, path: str = "output") -> list[Difference]:
    """Every leaf that differs. Trees of the same structure; constants are compared with ``==``."""
    found = []
    for (where, one), (_, other) in zip(tree_leaves(got, path), tree_leaves(expected, path), strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            found.append(difference(one, other, where))
        elif one != other:
            found.append(Difference(path=f"{where}, {one!r} in place of {other!r}", num_different=1, num_elements=1,
                                    max_abs=None, relative=None, num_non_finite=0, first_index=()))  # fmt: skip
    return [item for item in found if item is not None]


def spread(runs: Sequence[Tree]) -> list[float]:
    """For each tensor, the largest difference between any two of the runs; infinite where one is finite alone."""
    leaves = [[leaf for _, leaf in tree_leaves(run) if isinstance(leaf, Tensor)] for run in runs]
    result = [0.0] * len(leaves[0])
    for i, one in enumerate(leaves):
        for other in leaves[:i]:
            for index, (a, b) in enumerate(zip(one, other, strict=True)):
                result[index] = max(result[index], _gap(a, b))
    return result


def within(got: Tree, runs: Sequence[Tree], allowed: Sequence[float]) -> bool:
    """Whether each tensor of ``got`` is as near to one of the runs as ``allowed`` says."""
    leaves = [leaf for _, leaf in tree_leaves(got) if isinstance(leaf, Tensor)]
    others = [[leaf for _, leaf in tree_leaves(run) if isinstance(leaf, Tensor)] for run in runs]
    return all(min(_gap(leaf, other[index]) for other in others) <= allowed[index] for index, leaf in enumerate(leaves))


def _gap(one: Tensor, other: Tensor) -> float:
    if same_bits(one, other):
        return 0.0
    if one.shape != other.shape or not torch.equal(torch.isfinite(one), torch.isfinite(other)):
        return math.inf
    return distance(one, other)[0]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
