"""How long the host is busy with each step of a replay, measured on a few of the first ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

_SKIPPED = 1
"""The first replay loads what the later ones find."""
_MEASURED = 3


class HostTimes:
    """Of one plan. After the measured replays it costs a comparison a replay.

    Args:
        num_launches: Steps of a replay that launch or run something.
    """

    def __init__(self, num_launches: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(num_launches)]

    def timed(self, launches: Sequence[Callable[[], None]], num_replays: int) -> Sequence[Callable[[], None]]:
        """``launches``, each with a clock around it if the replay after ``num_replays`` others is to be measured."""
        if not _SKIPPED <= num_replays < _SKIPPED + _MEASURED:
            return launches
        return [partial(self._run, samples, launch) for samples, launch in zip(self._samples, launches, strict=True)]

    @staticmethod
    def _run(samples: list[float], launch: Callable[[], None]) -> None:
        started = time.perf_counter()
        launch()
        samples.append(time.perf_counter() - started)

    def medians(self) -> list[float | None]:
        """Seconds of each launch; None before there were enough replays."""
        return [median(samples) if samples else None for samples in self._samples]
