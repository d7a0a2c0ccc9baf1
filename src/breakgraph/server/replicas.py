"""Several engines behind one port, as replicas of Ray Serve. Needs the extra `breakgraph[ray]`.

The process that listens has no model: it hands each request to a replica and its response back. Which replica that is,
whether it is well and that it is replaced is Ray Serve's business; its own HTTP proxies are not used, so errors are
OpenAI's and nothing listens but the one port.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from breakgraph.engine.llm import LLM
from breakgraph.server.app import create_app
from breakgraph.server.config import ServerConfig
from breakgraph.server.errors import ApiError
from breakgraph.server.graphs import graphs_state
from breakgraph.server.middleware import AnswerFailures, CheckApiKey, LimitBody
from breakgraph.server.replica_states import PATHS, ReplicaStates
from breakgraph.server.run import listen_and_serve, make_service

_APPLICATION = "breakgraph"
_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""Ray's own, at the path that needs no engine of Ray's."""
_ROUTER_OPTIONS: dict[str, Any] = {"imbalanced_threshold": 8, "do_eviction": True}
"""A replica with so many requests more than another gets none for its prefixes; and old prefixes are forgotten."""
_MAX_REQUESTS = 1_000_000
"""Of a replica at a time: its engine says itself when it is full."""
_HEALTH_PERIOD_SEC = 5.0
_HEALTH_TIMEOUT_SEC = 5.0
"""Other requests wait until there is a replica again."""


@dataclass(frozen=True)
class Call:
    """An HTTP request on its way to a replica. The router looks at `prompt`: equal beginnings, same replica."""

    method: str
    path: str
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str

    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query_string,
            "headers": self.headers,
        }


class Replica:
    """One engine and its application, in a process that Ray Serve starts, asks for its health and replaces."""

    def __init__(self, engine_options: Mapping[str, Any], config: ServerConfig, *, is_on_loopback: bool) -> None:
        from ray.serve import get_replica_context

        if is_on_loopback:
            _keep_grpc_on_loopback()
        self._name = get_replica_context().replica_id.unique_id
        self._llm = LLM(**engine_options, use_tqdm=False)
        self._service = make_service(self._llm, config)
        self._app = create_app(self._service)
        self._is_started = False

    async def http(self, call: Call) -> AsyncIterator[Message]:
        """The messages of the response. Closed early, the application sees a client that left."""
        await self._start()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        has_left = asyncio.Event()
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def respond() -> None:
            try:
                await self._app(call.scope(), receive, messages.put)
            finally:
                messages.put_nowait(None)

        responding = asyncio.ensure_future(respond())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await responding
        finally:
            has_left.set()

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The name of this replica and its figures."""
        return self._name, self._service.engine.metrics.families()

    async def graphs(self) -> tuple[str, dict[str, Any]]:
        """The name of this replica and what ran in it."""
        await self._start()
        return self._name, await self._service.engine.call(graphs_state)

    async def check_health(self) -> None:
        """Raises when the engine cannot serve any more; Ray Serve then replaces this replica."""
        await self._start()
        if (failure := self._service.engine.failure) is not None:
            raise RuntimeError(failure)

    async def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            await self._service.engine.start()

    def __del__(self) -> None:
        with suppress(AttributeError):  # a model that could not be loaded
            self._service.engine.close()
            self._llm.close()


class Front:
    """The application of the process that listens."""

    def __init__(self, handle: Any, api_key: str | None) -> None:
        self._calls = handle.options(stream=True).http
        self._states = CheckApiKey(ReplicaStates(handle), api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        if scope["method"] == "GET" and scope["path"] in PATHS:
            await self._states(scope, receive, send)
            return
        body = (await receive())["body"]  # whole, after LimitBody
        response = self._calls.remote(_call(scope, body))
        forwarding = asyncio.ensure_future(_forward(response, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            limit = _HEALTH_TIMEOUT_SEC if scope["path"] == "/health" else None
            done, _ = await asyncio.wait((forwarding, leaving), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if forwarding in done:
                forwarding.result()
            elif not done:
                raise ApiError(503, "no replica answers", kind="server_error", code="unhealthy")
        finally:
            if not forwarding.done():
                response.cancel()
            forwarding.cancel()
            leaving.cancel()
            await asyncio.gather(forwarding, leaving, return_exceptions=True)


async def _forward(response: AsyncIterator[Message], send: Send) -> None:
    """Raises ApiError when the replica dies before its response begins; later the error ends the stream."""
    from ray.exceptions import RayError, RayTaskError

    has_begun = is_stream = False
    try:
        async for message in response:
            if message["type"] == "http.response.start":
                is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            has_begun = True
            await send(message)
    except RayTaskError:
        raise
    except RayError as error:
        died = ApiError(
            503,
            "the replica that had this request died, and what it generated is lost; send it again",
            kind="server_error",
            code="replica_died",
            headers={"Retry-After": "1"},
        )
        if not is_stream:
            if has_begun:
                raise
            raise died from error
        event = f"data: {json.dumps(died.body())}\n\n".encode()
        await send({"type": "http.response.body", "body": event, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


def _call(scope: Scope, body: bytes) -> Call:
    # The router divides by the length of the text.
    prompt = _prompt_text(body) or scope["path"]
    return Call(scope["method"], scope["path"], scope["query_string"], scope["headers"], body, prompt)


def _prompt_text(body: bytes) -> str:
    """Whatever text a body has that prompts may share; checking it is for the replica."""
    try:
        content = json.loads(body)
    except (RecursionError, ValueError):
        return ""
    if not isinstance(content, dict):
        return ""
    prompt = content.get("messages") or content.get("prompt") or ""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def front_app(handle: Any, api_key: str | None) -> ASGIApp:
    """With the limit of bodies. The API key is checked by the replica that answers, or here where all of them do."""
    return AnswerFailures(LimitBody(Front(handle, api_key)))


def _keep_grpc_on_loopback() -> None:
    """In a replica's process: Ray Serve opens a port there for calls between deployments, on every interface."""
    from grpc.aio._server import Server

    def on_loopback(add_port: Callable[..., int]) -> Callable[..., int]:
        def add(self: Any, address: str, *args: Any) -> int:
            return add_port(self, f"127.0.0.1:{address.rpartition(':')[2]}", *args)

        return add

    Server.add_insecure_port = on_loopback(Server.add_insecure_port)
    Server.add_secure_port = on_loopback(Server.add_secure_port)


def serve_replicas(
    engine_options: Mapping[str, Any],
    config: ServerConfig,
    bound: socket.socket,
    num_replicas: int,
    ray_address: str | None,
) -> None:
    """Serves at the address that was bound until the process is told to stop.

    Args:
        ray_address: of a running Ray cluster; None starts one of this process alone, on loopback.

    Raises ConfigError when somebody else listens there meanwhile; whatever keeps replicas from starting comes through.
    """
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    own: dict[str, Any] = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(
        ray_address or "local",
        log_to_driver=False,
        logging_level=logging.WARNING,
        **(own if ray_address is None else {}),
    )
    on_gpu = engine_options.get("device") != "cpu" and bool(ray.cluster_resources().get("GPU"))
    make_deployment: Any = serve.deployment
    make_router_config: Any = RequestRouterConfig
    deployment = make_deployment(
        Replica,
        num_replicas=num_replicas,
        max_ongoing_requests=_MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0, "num_gpus": int(on_gpu)},
        health_check_period_s=_HEALTH_PERIOD_SEC,
        graceful_shutdown_timeout_s=config.drain_timeout,
        request_router_config=make_router_config(request_router_class=_ROUTER, request_router_kwargs=_ROUTER_OPTIONS),
    )
    try:
        serve.start(proxy_location="Disabled")
        application = deployment.bind(dict(engine_options), config, is_on_loopback=ray_address is None)
        handle = serve.run(application, name=_APPLICATION, route_prefix=None)
        model = config.served_model_name or engine_options["model"]
        listen_and_serve(front_app(handle, config.api_key), config, bound, model)
    finally:
        serve.shutdown()
        ray.shutdown()
