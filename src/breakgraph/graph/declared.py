"""What the captured code is told about host values: constants that stay, and names of values that change."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch

from breakgraph.errors import ConfigError
from breakgraph.graph.eager_break import active
from breakgraph.graph.tree import describe, is_constant

T = TypeVar("T", bool, int, float, complex, str, bytes)


@overload
def constant(value: torch.Tensor) -> Any: ...


@overload
def constant(value: T) -> T: ...


def constant(value: Any) -> Any:
    """Declare that a host value is the same at every replay.

    For a tensor: its value on the host, a number or nested lists of them. Captured code may use it in Python control
    flow: it is read in the warm-up, and the capture gets what was read there. For a number that a break read on the
    host: the number, which the break may then return.

    Nothing checks a tensor's value at a replay; a break's result is compared with that of the capture.

    Raises:
        ConfigError: neither a tensor nor a constant.
    """
    if not isinstance(value, torch.Tensor) and not is_constant(value):
        raise ConfigError(f"expected a tensor or a constant to declare, got {describe(value)}")

    return _constant(value)


def _constant(value: Any) -> Any:
    def read() -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    run = active.builder or active.warm_up
    return read() if run is None else run.constant(value, read)
