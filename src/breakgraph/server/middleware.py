"""What happens to every request around its endpoint: size limit, API key, unexpected errors, the count of responses."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakgraph.server.config import MAX_BODY_BYTES
from breakgraph.server.errors import ApiError, as_api_error
from breakgraph.server.metrics import Metrics

_MAX_READ_BYTES = 8 * MAX_BODY_BYTES
"""Of a body that is too large so much is read and dropped, so that its sender gets to read the refusal."""

_UNKNOWN = "other"


class CountResponses:
    """Counts by the endpoint's path and the status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", _UNKNOWN)
                self._metrics.http_requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)


class AnswerFailures:
    """500 for an exception that nobody expected; the connection stays usable."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watching_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        except Exception as error:
            if has_begun:
                raise
            await as_api_error(error).response()(scope, receive, send)


class CheckApiKey:
    """401 for a request under /v1/ without the key as bearer token."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None and scope["path"].startswith("/v1/"):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                message = "wrong or no API key; send it as 'Authorization: Bearer KEY'"
                refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitBody:
    """413 for a body of more than MAX_BODY_BYTES, however its length is declared."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        chunks: list[bytes] = []
        size, is_complete = 0, False
        while not is_complete and size <= _MAX_READ_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            chunk = message.get("body", b"")
            size += len(chunk)
            is_complete = not message.get("more_body", False)
            if size <= MAX_BODY_BYTES:
                chunks.append(chunk)
            else:
                chunks.clear()
        if size > MAX_BODY_BYTES:
            refusal = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")
            await refusal.response()(scope, receive, send)
            return
        body: list[Message] = [{"type": "http.request", "body": b"".join(chunks), "more_body": False}]
        chunks.clear()

        async def replayed_receive() -> Message:
            return body.pop() if body else await receive()

        await self._app(scope, replayed_receive, send)
