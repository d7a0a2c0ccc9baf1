"""The process that listens for replicas, with a replica that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError
from starlette.types import Message

from breakgraph.server import replicas
from breakgraph.server.config import MAX_BODY_BYTES
from breakgraph.server.replicas import Call, front_app

JSON_START: Message = {
    "type": "http.response.start",
    "status": 201,
    "headers": [(b"content-type", b"application/json")],
}
STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
Respond = Callable[[Call], AsyncIterator[Message]]


class FakeHandle:
    """Of a deployment whose method `http` is `respond`."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self.calls: list[Call] = []
        self.num_cancelled = 0

    def options(self, *, stream: bool) -> FakeHandle:
        assert stream
        return self

    @property
    def http(self) -> FakeHandle:
        return self

    def remote(self, call: Call) -> FakeResponse:
        self.calls.append(call)
        return FakeResponse(self, self._respond(call))


class FakeResponse:
    def __init__(self, handle: FakeHandle, messages: AsyncIterator[Message]) -> None:
        self._handle = handle
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages

    def cancel(self) -> None:
        self._handle.num_cancelled += 1


def body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def send(handle: FakeHandle, method: str = "POST", path: str = "/v1/completions", **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(front_app(handle))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.request(method, path, **options)

    return asyncio.run(ask())


async def answer(call: Call) -> AsyncIterator[Message]:
    yield JSON_START
    yield body(b"{}", more=True)
    yield body(b" ")


async def die_at_once(call: Call) -> AsyncIterator[Message]:
    raise ActorDiedError
    yield


async def die_in_a_stream(call: Call) -> AsyncIterator[Message]:
    yield STREAM_START
    yield body(b"data: {}\n\n", more=True)
    raise ActorDiedError


async def never(call: Call) -> AsyncIterator[Message]:
    await asyncio.Event().wait()
    yield JSON_START


def test_a_response_comes_as_the_replica_gave_it() -> None:
    handle = FakeHandle(answer)
    response = send(handle, json={"prompt": "hello"}, params={"a": "1"})
    assert (response.status_code, response.content) == (201, b"{} ")
    (call,) = handle.calls
    assert (call.method, call.path, call.query_string, json.loads(call.body)) == (
        *("POST", "/v1/completions", b"a=1"),
        {"prompt": "hello"},
    )
    assert handle.num_cancelled == 0


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b'{"prompt": "hello"}', "hello"),
        (b'{"prompt": ["a", "b"]}', '["a", "b"]'),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', '[{"role": "user", "content": "hi"}]'),
        (b"", "/v1/completions"),
        (b"[1]", "/v1/completions"),
        (b"\xff", "/v1/completions"),
        (b"[" * 100_000, "/v1/completions"),
    ],
)
def test_the_router_always_has_a_text_to_look_at(content: bytes, prompt: str) -> None:
    handle = FakeHandle(answer)
    send(handle, content=content)
    assert handle.calls[0].prompt == prompt


def test_a_replica_that_dies_first_is_503() -> None:
    response = send(FakeHandle(die_at_once))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "replica_died"


def test_a_replica_that_dies_in_a_stream_ends_it_with_the_error() -> None:
    response = send(FakeHandle(die_in_a_stream))
    first, last = response.text.strip().split("\n\n")
    assert (response.status_code, first) == (200, "data: {}")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_died"


def test_without_a_replica_health_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_HEALTH_TIMEOUT_SEC", 0.01)
    handle = FakeHandle(never)
    response = send(handle, "GET", "/health")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unhealthy")
    assert handle.num_cancelled == 1


def test_large_bodies_reach_no_replica() -> None:
    handle = FakeHandle(answer)
    assert send(handle, content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
    assert handle.calls == []


def test_a_client_that_leaves_cancels_its_call() -> None:
    handle = FakeHandle(never)

    async def leave() -> None:
        messages: list[Message] = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": b"", "more_body": False},
        ]

        async def receive() -> Message:
            return messages.pop()

        async def nobody(message: Message) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        await front_app(handle)(scope, receive, nobody)

    asyncio.run(leave())
    assert handle.num_cancelled == 1
