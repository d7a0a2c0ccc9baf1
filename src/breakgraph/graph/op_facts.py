"""What an operator tells of itself by its schema, its tags and its kernels, looked up once for a whole capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from breakgraph.graph.effects import allocates_only
from breakgraph.graph.refusals import is_suspect


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Of one operator on one kind of device, whatever its arguments.

    Attributes:
        is_composite: Whether it runs as other operators there, see :func:`parts_of`: torch has no kernel for it.
        is_suspect: Whether a refusal is possible, see :func:`is_suspect`.
        is_view: Whether it only shows its argument's memory in another way, in place or not.
        allocates_only: See :func:`allocates_only`.
        is_launched: Whether a kernel runs for it, where there is something to compute.
        is_mutable: Whether it writes an argument.
        reads_host: Whether it reads a device value on the host.
        is_random: Whether it draws from a generator.
    """

    is_composite: bool
    is_suspect: bool
    is_view: bool
    allocates_only: bool
    is_launched: bool
    is_mutable: bool
    reads_host: bool
    is_random: bool

    @classmethod
    def of(cls, func: torch._ops.OpOverload, device_type: str) -> OpFacts:
        """Ask the operator."""
        tags = func.tags
        is_view = func.is_view or torch.Tag.inplace_view in tags
        own_kernel = "CUDA" if device_type == "cuda" else "CPU"
        only_allocates = allocates_only(func)
        return cls(
            is_composite=_has_kernel(func, "CompositeImplicitAutograd")
            and not any(_has_kernel(func, key) for key in (own_kernel, *_BEFORE_COMPOSITE)),
            is_suspect=is_suspect(func),
            is_view=is_view,
            allocates_only=only_allocates,
            is_launched=not is_view and not only_allocates,
            is_mutable=func._schema.is_mutable,
            reads_host=torch.Tag.data_dependent_output in tags,
            is_random=torch.Tag.nondeterministic_seeded in tags,
        )


_BEFORE_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Kernels for all devices that the dispatcher prefers to taking an operator apart."""


def _has_kernel(func: torch._ops.OpOverload, key: str) -> bool:
    """Of torch's dispatcher. Decompositions in Python, which compilers use, round otherwise than its kernels."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def parts_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a composite operator returns, computed by the operators that it is made of.

    The dispatcher shows it whole only where autograd has no part in it: in inference mode, or on tensors made there.
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


class OpTable(dict[torch._ops.OpOverload, OpFacts]):
    """Facts by operator, found when first asked for. Belongs to one capture: kernels may be registered after it."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __missing__(self, func: torch._ops.OpOverload) -> OpFacts:
        facts = self[func] = OpFacts.of(func, self._device_type)
        return facts
