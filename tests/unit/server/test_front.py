"""The process that listens for replicas, with a replica that does what the test says."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError
from starlette.types import Message

from breakgraph.server import replica_states, replicas
from breakgraph.server.config import MAX_BODY_BYTES
from breakgraph.server.replicas import Call, front_app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, about Pydantic
    from ray.serve.exceptions import RayServeException

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

    def __init__(self, respond: Respond, states: Mapping[str, list[Any]] = MappingProxyType({})) -> None:
        self._respond = respond
        self._states = states
        self.calls: list[Call] = []
        self.num_cancelled = 0

    def options(self, *, stream: bool) -> FakeHandle:
        assert stream
        return self

    @property
    def http(self) -> FakeHandle:
        return self

    def broadcast(self, method: str) -> FakeBroadcast:
        return FakeBroadcast(self._states[method])

    def remote(self, call: Call) -> FakeResponse:
        self.calls.append(call)
        return FakeResponse(self, self._respond(call))


class FakeBroadcast:
    """Each replica's result, or the error that it raised; None is a replica that never answers."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if not self._results:
            raise RayServeException
        if None in self._results:
            await asyncio.Event().wait()
        return self._results


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


def send(
    handle: FakeHandle, method: str = "POST", path: str = "/v1/completions", key: str | None = None, **options: Any
) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(front_app(handle, key))
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
        await front_app(handle, None)(scope, receive, nobody)

    asyncio.run(leave())
    assert handle.num_cancelled == 1


def figures(num_answers: int, state: str) -> list[Any]:
    registry = CollectorRegistry()
    Counter("answers", "Answers", ["reason"], registry=registry).labels("stop").inc(num_answers)
    Gauge("blocks", "Blocks", ["state"], registry=registry).labels(state).set(7)
    Histogram("wait_seconds", "Waits", buckets=(1.0,), registry=registry).observe(0.5)
    return list(registry.collect())


def test_metrics_are_those_of_all_replicas() -> None:
    states = {"metrics": [("b", figures(2, "free")), ("a", figures(3, "used")), ActorDiedError()]}
    response = send(FakeHandle(answer, states), "GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text.count("# TYPE answers_total counter") == response.text.count("# HELP answers_total") == 1
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    assert [sample for sample in samples if not sample[0].startswith("wait")] == [
        ("answers_total", {"replica": "a", "reason": "stop"}, 3),
        ("answers_total", {"replica": "b", "reason": "stop"}, 2),
        ("blocks", {"replica": "a", "state": "used"}, 7),
        ("blocks", {"replica": "b", "state": "free"}, 7),
    ]
    assert ("wait_seconds_bucket", {"replica": "b", "le": "1.0"}, 1) in samples


def engine_state(num_replays: int) -> dict[str, Any]:
    memory = dict.fromkeys(("weight_bytes", "kv_cache_bytes", "pool_bytes", "output_bytes"), 0)
    return {
        "model": "tiny",
        "device": "cpu",
        "emulated": True,
        "dtype": "float32",
        "max_model_len": 8,
        "phases": [
            {
                "phase": "decode",
                "attention": "sdpa",
                "backend": "full",
                "hit_rate": 1.0,
                "num_replays": num_replays,
                "num_eager_steps": 0,
                "num_padded_tokens": 0,
                "buckets": [],
                "num_eager_steps_by_reason": {},
            }
        ],
        "requests": {"num_running": 0, "num_waiting": 0, "num_preemptions": 0},
        "prefix_cache": {"num_prompt_tokens": 0, "num_prefix_cached_tokens": 0},
        "memory": memory | {"num_kv_blocks": 5, "num_free_kv_blocks": 4},
    }


def test_graphs_are_those_of_all_replicas() -> None:
    handle = FakeHandle(answer, {"graphs": [("b", engine_state(20)), ("a", engine_state(10))]})
    state = send(handle, "GET", "/v1/graphs").json()
    assert (state["model"], state["device"], "phases" in state) == ("tiny", "cpu", False)
    found = {replica["replica"]: replica["phases"][0]["num_replays"] for replica in state["replicas"]}
    assert found == {"a": 10, "b": 20}
    page = send(handle, "GET", "/v1/graphs", headers={"Accept": "text/html"}).text
    assert page.index("Replica a</h2>") < page.rindex("of 10 steps") < page.index("Replica b</h2>")
    assert page.count("href='#") == 2
    assert handle.calls == []


def test_the_state_of_replicas_needs_the_key_but_their_figures_do_not() -> None:
    handle = FakeHandle(answer, {"graphs": [("a", engine_state(10))], "metrics": [("a", figures(1, "free"))]})
    assert send(handle, "GET", "/v1/graphs", "secret").status_code == 401
    assert send(handle, "GET", "/v1/graphs", "secret", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert send(handle, "GET", "/metrics", "secret").status_code == 200


@pytest.mark.parametrize("results", [[], [ActorDiedError()], [None]], ids=["none", "dead", "silent"])
def test_without_a_replica_its_state_is_503(results: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_states, "_TIMEOUT_SEC", 0.01)
    response = send(FakeHandle(answer, {"metrics": results}), "GET", "/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unhealthy")


def test_other_methods_are_refused_by_a_replica() -> None:
    handle = FakeHandle(answer)
    send(handle, "POST", "/metrics")
    assert len(handle.calls) == 1
