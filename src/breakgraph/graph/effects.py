"""Which tensors an operator reads and writes, from its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_ALLOCATES_ONLY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
)
# The destination of these is written, not read, though the schema shows it as an in-place argument.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_",
        "index_copy_", "index_put_", "_index_put_impl_", "scatter_",
    )
)  # fmt: skip
_FILLS_NOISE = frozenset({"aten::rrelu_with_noise", "aten::rrelu_with_noise_"})
_SEQUENCES = (list, tuple)
# Argument names by which operators take memory to write their result into.
_OUT_NAMES = frozenset({"out", "out0", "out1", "out2", "out3", "values", "indices"})


def allocates_only(func: torch._ops.OpOverload) -> bool:
    """Whether the operator returns memory without writing it."""
    return func._schema.name in _ALLOCATES_ONLY


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors in operator arguments or results (each a tensor, a list, or a list of lists)."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES):
            found += tensors_in(*value)
    return found


def bound_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch._C.Argument, Any]]:
    """Each schema argument that was given, with its value."""
    for index, spec in enumerate(func._schema.arguments):
        if index < len(args):
            yield spec, args[index]
        elif spec.name in kwargs:
            yield spec, kwargs[spec.name]


def reads_and_writes(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The argument tensors whose bytes the operator reads, and those it writes.

    ``index_put_``, ``index_copy_`` and ``scatter_`` count as writing their whole destination: which rows they reach
    depends on values.
    """
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for spec, value in bound_arguments(func, args, kwargs):
        tensors = tensors_in(value)
        if spec.alias_info is not None and spec.alias_info.is_write:
            writes += tensors
            if not _writes_only(func, spec):
                reads += tensors
        else:
            reads += tensors
    return reads, writes


def _writes_only(func: torch._ops.OpOverload, spec: torch._C.Argument) -> bool:
    if func.namespace != "aten":
        return True  # an opaque operator: its schema does not tell an output buffer from an accumulator
    if spec.kwarg_only and spec.name in _OUT_NAMES:
        return True
    if func._schema.name in _OVERWRITES:
        return spec.name == "self"
    return func._schema.name in _FILLS_NOISE and spec.name == "noise"
