"""One use of a plan family at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from breakgraph.errors import ClosedError, ReplayError


class Turns:
    """Whose turn it is: another thread waits for its own, and one inside of one (a break of the family) is refused.

    A replay does by itself what :meth:`turn` does, in one function. So an interrupt of the user's, which Python raises
    where a function begins or a call into C has returned, finds the turn taken by nobody, or inside the `try`.

    Attributes:
        lock: Held for as long as a turn lasts.
        busy: What the turn is for; None while there is none.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.lock = threading.RLock()
        self.busy: str | None = None

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """Raises ClosedError or ReplayError, and no turn is taken."""
        with self.lock:
            self.check(what)
            try:
                self.busy = what
                yield
            finally:
                self.busy = None

    def check(self, what: str) -> None:
        """Raise ClosedError or ReplayError if there is no turn to be had now. For who holds the lock."""
        if self.is_closed:
            raise ClosedError("the plan family was closed; make a new one")
        if self.busy is not None:
            raise ReplayError(f"{what} was asked for inside {self.busy} of its own family, whose pool is in use")
