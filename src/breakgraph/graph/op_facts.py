"""What an operator tells of itself by its schema, its tags and its kernels, looked up once for a whole capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from breakgraph.graph.effects import allocates_only
from breakgraph.graph.refusals import is_suspect


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Of one operator, whatever its arguments.

    Attributes:
        may_decompose: Whether ``decompose()`` gives something: it is made of other operators.
        is_suspect: Whether a refusal is possible, see :func:`is_suspect`.
        is_view: Whether it only shows its argument's memory in another way, in place or not.
        allocates_only: See :func:`allocates_only`.
        is_launched: Whether a kernel runs for it, where there is something to compute.
        is_mutable: Whether it writes an argument.
        reads_host: Whether it reads a device value on the host.
    """

    may_decompose: bool
    is_suspect: bool
    is_view: bool
    allocates_only: bool
    is_launched: bool
    is_mutable: bool
    reads_host: bool

    @classmethod
    def of(cls, func: torch._ops.OpOverload) -> OpFacts:
        """Ask the operator."""
        tags = func.tags
        only_allocates = allocates_only(func)
        return cls(
            may_decompose=func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
            is_suspect=is_suspect(func),
            is_view=func.is_view or torch.Tag.inplace_view in tags,
            allocates_only=only_allocates,
            is_launched=not func.is_view and not only_allocates,
            is_mutable=func._schema.is_mutable,
            reads_host=torch.Tag.data_dependent_output in tags,
        )


class OpTable(dict[torch._ops.OpOverload, OpFacts]):
    """Facts by operator, found when first asked for. Belongs to one capture: kernels may be registered after it."""

    def __missing__(self, func: torch._ops.OpOverload) -> OpFacts:
        facts = self[func] = OpFacts.of(func)
        return facts
