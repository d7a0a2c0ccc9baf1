"""Calls that make the host wait for the GPU, as errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Torch raises at what would make the host wait: a pageable copy, a number that is read. Elsewhere no effect."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
