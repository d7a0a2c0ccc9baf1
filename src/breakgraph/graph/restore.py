"""Random generators and registered state, as they were before a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from breakgraph.graph.device import Device


@contextmanager
def restored(device: Device, state: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Put random generators and registered state back at the end, and whenever the yielded function is called."""
    rng = device.rng_state()
    saved = [(tensor, tensor.detach().clone()) for tensor in state]

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.detach().copy_(value)
        device.set_rng_state(rng)

    try:
        yield restore
    finally:
        restore()
        device.synchronize()
