"""Until when a request is worked on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from breakgraph.server.errors import request_timeout


class Deadline:
    """`timeout_sec` seconds from its making on, for all that one request waits for."""

    def __init__(self, timeout_sec: float) -> None:
        self._timeout_sec = timeout_sec
        self._at = time.monotonic() + timeout_sec

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Ends what is waited for within when the time is over. Raises ApiError 408."""
        try:
            async with asyncio.timeout(self._at - time.monotonic()):
                yield
        except TimeoutError:
            raise request_timeout(self._timeout_sec) from None
