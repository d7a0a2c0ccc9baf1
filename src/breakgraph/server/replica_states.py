"""What all replicas say of themselves: figures for Prometheus, and what is captured and what ran."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from breakgraph.server.errors import ApiError
from breakgraph.server.graphs import graphs_page, of_replicas
from breakgraph.server.metrics import CONTENT_TYPE, text_of_replicas

PATHS = ("/metrics", "/v1/graphs")
_TIMEOUT_SEC = 5.0


class ReplicaStates:
    """Answers GET for PATHS by asking every replica."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError when no replica answers, or one does not in time."""
        if scope["path"] == "/metrics":
            response = Response(text_of_replicas(await self._ask("metrics")), media_type=CONTENT_TYPE)
        else:
            state = of_replicas(await self._ask("graphs"))
            wants_page = "text/html" in Headers(scope=scope).get("accept", "")
            response = HTMLResponse(graphs_page(state)) if wants_page else JSONResponse(state)
        await response(scope, receive, send)

    async def _ask(self, method: str) -> Mapping[str, Any]:
        """By the replica's name; those that die meanwhile are left out."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        asking = self._handle.broadcast(method).results_async(return_exceptions=True)
        try:
            answers = await asyncio.wait_for(asking, _TIMEOUT_SEC)
        except (RayServeException, TimeoutError):
            answers = []
        found = {}
        for answer in answers:
            if isinstance(answer, tuple):
                name, state = answer
                found[name] = state
            elif not isinstance(answer, RayError):
                raise answer
        if not found:
            raise ApiError(503, "no replica answers", kind="server_error", code="unhealthy")
        return dict(sorted(found.items()))
