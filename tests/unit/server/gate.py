"""Holds an engine back, so that tests decide what happens while requests run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from breakgraph.engine.engine import Engine
from breakgraph.engine.request import Request


class Gate:
    """Lets an engine's steps through only as many as were allowed."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        step = engine.step

        def gated(meanwhile: Callable[[], None] = lambda: None) -> list[Request]:
            self._allowed.acquire()
            return step(meanwhile)

        monkeypatch.setattr(engine, "step", gated)

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)


def wait_until(condition: Callable[[], bool]) -> None:
    """Hangs, until the test's timeout, when it never holds."""
    while not condition():
        time.sleep(0.002)
