"""The calls that FlashInfer's wrapper makes into its compiled module, learnt once and made again.

`plan` and `run` of the wrapper look at their arguments and copy small tensors for longer than the launch takes. What
they hand to the module depends on the step and the layer in a few places only, and those are found by identity.
Learning reads attributes of the wrapper that are not public (`_cached_module`, `_plan_info` and others): another
FlashInfer without them fails when a kernel is made, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from breakgraph.errors import ConfigError

_ROWS, _REQUESTS = 6, 7
"""Places of two numbers among the arguments of a plan, which have no identity."""


class UnknownFlashInfer(ConfigError):
    """The version that is installed does not do what is known of 0.6.14."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"attention 'flashinfer' knows flashinfer-python 0.6.14, and the one installed differs: {what}; install "
            "that one, or use attention='triton'"
        )


def _the_call(seen: Sequence[tuple[object, ...]]) -> tuple[object, ...]:
    if len(seen) != 1:
        raise UnknownFlashInfer(f"it calls its compiled module {len(seen)} times")
    return seen[0]


class LearntCall:
    """One call, in which the values at some places are set anew."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[object], values: Sequence[object]) -> None:
        """`values`: those among the arguments that will be set, in the order of `set`."""
        self.arguments = list(arguments)
        self._function = function
        self._places = [[i for i, argument in enumerate(arguments) if argument is value] for value in values]
        if not all(self._places):
            raise UnknownFlashInfer("it calls its compiled module with other arguments")

    def set(self, values: Sequence[object], first: int = 0) -> None:
        """Put values into the places from number `first` on."""
        for places, value in zip(self._places[first:], values, strict=False):
            for place in places:
                self.arguments[place] = value

    def __call__(self) -> Any:
        return self._function(*self.arguments)


class PlanCall(LearntCall):
    """The plan of a step, from its host arrays."""

    def __init__(self, wrapper: Any, plan: Callable[[], object], host: Sequence[torch.Tensor]) -> None:
        """Learns from `plan()`, which calls `wrapper.plan` with these arrays, and has done so before; plans nothing.

        Args:
            host: Running sums of rows and of pages, and lengths.
        """
        module, jit_module = wrapper._cached_module, wrapper._jit_module
        seen: list[tuple[object, ...]] = []

        def note(*arguments: object) -> object:
            seen.append(arguments)
            return wrapper._plan_info

        wrapper._jit_module = SimpleNamespace(plan=note)
        try:
            plan()
        finally:
            wrapper._cached_module, wrapper._jit_module = module, jit_module
        arguments = _the_call(seen)
        super().__init__(module.plan, arguments, host)
        if arguments[_ROWS : _REQUESTS + 1] != (int(host[0][-1]), len(host[2])):
            raise UnknownFlashInfer("it plans with other arguments")

    def of_step(self, host: Sequence[torch.Tensor], num_rows: int) -> Any:
        """What FlashInfer calls the plan information.

        Args:
            num_rows: The step's, or with fixed shapes the most that there can be.
        """
        self.set(host)
        self.arguments[_ROWS], self.arguments[_REQUESTS] = num_rows, len(host[2])
        return self()


class RunCall(LearntCall):
    """A launch: of a plan, then of a layer."""

    def __init__(self, wrapper: Any, tensors: Sequence[torch.Tensor], extra: Sequence[object]) -> None:
        """Learns from one `wrapper.run` on (q, key_cache, value_cache, out, ...); launches nothing."""
        module = wrapper._cached_module
        seen: list[tuple[object, ...]] = []
        wrapper._cached_module = SimpleNamespace(paged_run=lambda *arguments: seen.append(arguments))
        q, key_cache, value_cache, out, *_ = tensors
        wrapper._qo_indptr_last = len(q)  # it has seen no plan but the first
        try:
            wrapper.run(q, (key_cache, value_cache), *extra, out=out)
        finally:
            wrapper._cached_module = module
        arguments = _the_call(seen)
        buffers = (
            wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf,
            wrapper._paged_kv_last_page_len_buf, wrapper._paged_kv_indices_buf,
        )  # fmt: skip
        super().__init__(module.paged_run, arguments, [*tensors, wrapper._plan_info, *buffers])
        self._num_layer = len(tensors)
        self._nothing = [None] * len(tensors)
        self.set(self._nothing)

    def use_plan(self, plan_info: Any, buffers: Sequence[torch.Tensor]) -> None:
        """`buffers`: running sums of rows and of pages, lengths of last pages, pages; on the device."""
        self.set([plan_info, *buffers], self._num_layer)

    def of_layer(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch it on (q, key_cache, value_cache, out, ...)."""
        self.set(tensors)
        try:
            self()
        finally:
            self.set(self._nothing)  # a capture's pool blocks may not outlive it
