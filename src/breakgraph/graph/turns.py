"""One use of a plan family at a time."""

from __future__ import annotations

import threading

from breakgraph.errors import ClosedError, ReplayError


class Turns:
    """Whose turn it is: another thread waits for its own, and one inside of one (a break of the family) is refused."""

    def __init__(self) -> None:
        self.is_closed = False
        self._lock = threading.RLock()
        self._busy: str | None = None

    def take(self, what: str) -> None:
        """Wait for a turn, and take it. Raises ClosedError or ReplayError, and none is taken."""
        self._lock.acquire()
        if not self.is_closed and self._busy is None:
            self._busy = what
            return
        busy = self._busy
        self._lock.release()
        if self.is_closed:
            raise ClosedError("the plan family was closed; make a new one")
        raise ReplayError(f"{what} was asked for inside {busy} of its own family, whose pool is in use")

    def give(self) -> None:
        """Give up the turn that was taken."""
        self._busy = None
        self._lock.release()


class Turn:
    """A turn as a context."""

    __slots__ = ("_turns", "_what")

    def __init__(self, turns: Turns, what: str) -> None:
        self._turns = turns
        self._what = what

    def __enter__(self) -> None:
        self._turns.take(self._what)

    def __exit__(self, *exc: object) -> None:
        self._turns.give()
