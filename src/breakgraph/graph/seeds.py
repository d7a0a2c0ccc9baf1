"""Seeds that captured code sets: a replay runs no Python, and draws on from wherever the generator is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from breakgraph.graph.refusals import Fault

_MARK = 0x5EED_0F_A_5CA4
"""A seed that nobody else sets."""
_WHY = "is seeded, or set to a state, by every call, and a replay seeds nothing"
FAULT = Fault("unregistered generator", "a random generator", _WHY)
WAY_OUT = "seed outside of the captured function, before a replay, or in an eager break"


class SeedWatch:
    """Whether somebody seeds the generators of a device. Their state is put back by whoever asks.

    Args:
        generators: Get a seed of ours, to tell it from others, even from the one that they had.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        for generator in generators:
            generator.manual_seed(_MARK)
        self._seeds = [_MARK] * len(generators)

    def renew(self) -> None:
        """What they are seeded with now is right."""
        self._seeds = [generator.initial_seed() for generator in self._generators]

    @property
    def is_seeded(self) -> bool:
        """Whether one has another seed than it had."""
        return [generator.initial_seed() for generator in self._generators] != self._seeds


class RecordingSeeds:
    """While a segment is recorded on the CPU device nothing draws: a generator that changes was seeded."""

    def __init__(self) -> None:
        self._state = b""

    def start(self) -> None:
        """A segment opens."""
        self._state = _state()

    @property
    def is_seeded(self) -> bool:
        """Since :meth:`start`."""
        return self._state != _state()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around what only finds out how a result looks: it may draw."""
        state = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def _state() -> bytes:
    """Without an operator, which would be recorded."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)
