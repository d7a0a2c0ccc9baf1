"""Capture ladders: which sizes are captured, and which one serves a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from breakgraph.errors import ConfigError

_FINEST_STEP = 8
_STEPS_PER_OCTAVE = 4


def default_ladder(top: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8, then four an octave (so that padding adds a quarter at most), through ``top``.

    Raises:
        ConfigError: ``top`` is below 1.
    """
    if top < 1:
        raise ConfigError(f"a ladder needs a largest size of 1 or more, got {top}")
    sizes = [1, 2, 4]
    size = _FINEST_STEP
    while size < top:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(_FINEST_STEP, octave // _STEPS_PER_OCTAVE)
    return (*(small for small in sizes if small < top), top)


def check_ladder(buckets: Sequence[int], name: str) -> tuple[int, ...]:
    """An explicit ladder, as given: never widened, and its last bucket may be below what the scheduler sends.

    Args:
        name: The option the list came from, for messages.

    Raises:
        ConfigError: empty, not positive integers, or not strictly ascending.
    """
    ladder = tuple(buckets)
    if not ladder:
        raise ConfigError(f"{name}: expected at least one bucket, got none; to capture nothing use the eager backend")
    for bucket in ladder:
        if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < 1:
            raise ConfigError(f"{name}: expected positive integers, got {bucket!r}; remove it")
    for smaller, larger in pairwise(ladder):
        if larger <= smaller:
            raise ConfigError(
                f"{name}: expected an ascending list without repeats, got {larger} after {smaller}; sort it"
            )
    return ladder


def unused_buckets(ladder: Sequence[int], top: int) -> list[int]:
    """Buckets that no step needs: a smaller one holds ``top``, the largest size that the scheduler can send."""
    return list(ladder[bisect_left(ladder, top) + 1 :])


def bucket_for(ladder: Sequence[int], size: int) -> int | None:
    """The smallest bucket that holds ``size``, or None."""
    index = bisect_left(ladder, size)
    return ladder[index] if index < len(ladder) else None
