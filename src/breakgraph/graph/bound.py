"""Binding a captured call by its own ``bind=``, which may look at its arguments and not read what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.errors import BreakArgumentError
from breakgraph.graph.device import Device
from breakgraph.graph.eager_break import BreakSpec
from breakgraph.graph.effects import tensors_in
from breakgraph.graph.op_facts import OpTable, parts_of
from breakgraph.graph.refusals import Fault, applies_functions
from breakgraph.graph.tree import Tree, describe


def bind_call(
    spec: BreakSpec, args: Sequence[Any], kwargs: Mapping[str, Any], device: Device, ops: OpTable
) -> Callable[[], Tree] | None:
    """What ``spec.bind`` gives for these arguments; None for a break without it.

    Raises:
        BreakArgumentError: it computed something from a tensor, or gave nothing that can be called.
    """
    if spec.bind is None:
        return None
    watch = _ViewsOnly(spec.name, ops)
    guard = device.host_guard(watch.note_read, tags=False)
    guard.enabled = True
    with guard, watch:
        bound = spec.bind(*args, **kwargs)
    if not callable(bound):
        raise BreakArgumentError(
            f"bind= of break {spec.name} gave {describe(bound)}; return the function that is to run at every replay"
        )
    return bound


class _ViewsOnly(TorchDispatchMode):
    """Lets nothing pass that depends on what a tensor holds: replays would go on with the capture's values."""

    supports_higher_order_operators = True

    def __init__(self, name: str, ops: OpTable) -> None:
        super().__init__()
        self._name = name
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if applies_functions(func):
            raise self._refusal(str(func))
        facts = self._ops[func]
        if facts.is_composite:
            with self:
                return parts_of(func, args, kwargs)
        if facts.is_view or facts.allocates_only or not tensors_in(args, list(kwargs.values())):
            return func(*args, **kwargs)
        raise self._refusal(str(func))

    def note_read(self, fault: Fault) -> AbstractContextManager[None]:
        """For reads on the host that the dispatcher does not show."""
        raise self._refusal(fault.what)

    def _refusal(self, what: str) -> BreakArgumentError:
        return BreakArgumentError(
            f"bind= of break {self._name} ran {what} on a tensor: replays would go on with what the tensor held at the "
            "capture; take views there, and compute in the function that bind= returns"
        )
