"""Interrupts of the user's, at every point where Python can raise one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType


def interrupted(run: Callable[[], object]) -> Iterator[int]:
    """Call `run` once for each point, and raise KeyboardInterrupt there; gives the turn to the caller after each.

    Python looks for signals where a function begins and where a call into C has returned.
    """
    for number in itertools.count():
        left = iter(range(number))

        def profile(frame: FrameType, event: str, arg: object, left: Iterator[int] = left) -> None:
            if event in ("call", "c_return") and next(left, None) is None:
                sys.setprofile(None)
                raise KeyboardInterrupt

        was_interrupted = False
        try:
            sys.setprofile(profile)
            run()
        except KeyboardInterrupt:
            was_interrupted = True
        finally:
            sys.setprofile(None)
        if not was_interrupted:
            return
        yield number
