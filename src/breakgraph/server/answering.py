"""From a generation to an HTTP response: one JSON object, or server-sent events. A client that leaves ends it."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from breakgraph.server.errors import as_api_error
from breakgraph.server.forms import Form
from breakgraph.server.generation import Delta, Generation

T = TypeVar("T")

_CLIENT_LEFT = 499
"""Nobody reads it; it shows in the metrics."""


class Envelope:
    """What is the same in every part of one response."""

    def __init__(self, form: Form, model: str) -> None:
        self._form = form
        self._common = {"id": form.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._common, "object": self._form.whole_object, "choices": choices, "usage": usage}

    def part(self, choices: list[dict[str, Any]], **usage: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._common, "object": self._form.part_object, "choices": choices, **usage}


async def answer_whole(receive: Receive, generation: Generation, form: Form, envelope: Envelope) -> Response:
    """All answers at once."""

    async def collect() -> list[Delta]:
        answers = [Delta(index, "", [], None) for index in range(generation.num_answers)]
        async for delta in generation:
            answers[delta.index].append(delta)
        return answers

    async with generation:
        answers = await _until_disconnect(receive, collect())
    if answers is None:
        return Response(status_code=_CLIENT_LEFT)
    return JSONResponse(envelope.whole([form.whole(answer) for answer in answers], generation.usage()))


class EventStream(Response):
    """Answers in parts, each as soon as it is there. An error after the first part is the last event."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, form: Form, envelope: Envelope, *, include_usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._form = form
        self._envelope = envelope
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with self._generation:
            await _until_disconnect(receive, send_all())

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for choices in self._openings():
                yield self._part(choices)
            async for delta in self._generation:
                if delta.text or delta.tokens or delta.prompt_tokens or delta.finish_reason is not None:
                    yield self._part([self._form.part(delta)])
            if self._include_usage:
                yield _event(self._envelope.part([], usage=self._generation.usage()))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _event(as_api_error(error).body())

    def _openings(self) -> list[list[dict[str, Any]]]:
        openings = map(self._form.opening, range(self._generation.num_answers))
        return [[opening] for opening in openings if opening is not None]

    def _part(self, choices: list[dict[str, Any]]) -> bytes:
        return _event(self._envelope.part(choices, **({"usage": None} if self._include_usage else {})))


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; None when the client left first, and then `work` is cancelled."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
