"""The application: paths, middleware and life cycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

import breakgraph.server.metrics as figures
from breakgraph import __version__
from breakgraph.server import responses
from breakgraph.server.errors import ApiError, add_error_handlers
from breakgraph.server.graphs import graphs_page, graphs_state
from breakgraph.server.middleware import AnswerFailures, CheckApiKey, CountResponses, LimitBody
from breakgraph.server.protocol import ChatRequest, CompletionRequest
from breakgraph.server.service import Service

_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.ErrorBody, "description": about}
    for status, about in {
        400: "The request cannot be served",
        401: "Wrong or no API key",
        404: "No such model",
        408: "Not done in time",
        413: "The body is too large",
        429: "The queue is full",
        500: "The server failed",
        503: "The server is going down",
    }.items()
}
_STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: _REFUSALS[status] for status in statuses}


def create_app(service: Service) -> FastAPI:
    """Starts the service's engine when it is started, and closes its threads when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        yield
        await asyncio.to_thread(service.engine.close)

    # The pages that show an API load their scripts from elsewhere.
    app = FastAPI(title="breakgraph", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    _add_completions(app, service)
    _add_models(app, service)
    _add_state(app, service)
    # The one added last sees a request first.
    app.add_middleware(AnswerFailures)
    app.add_middleware(LimitBody)
    app.add_middleware(CheckApiKey, api_key=service.config.api_key)
    app.add_middleware(CountResponses, metrics=service.engine.metrics)
    _drop_422(app)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    def refusals(model: Any) -> dict[int | str, dict[str, Any]]:
        return {**_REFUSALS, 200: {"model": model, "content": _STREAM}}

    @app.post("/v1/completions", responses=refusals(responses.Completion))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)

    @app.post("/v1/chat/completions", responses=refusals(responses.ChatCompletion))
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)


def _add_models(app: FastAPI, service: Service) -> None:
    refusals = _refusals(401, 404)
    card = responses.ModelCard(
        id=service.model,
        object="model",
        created=service.started_at,
        owned_by="breakgraph",
        max_model_len=service.max_model_len,
    )

    @app.get("/v1/models", responses=_refusals(401))
    async def list_models() -> responses.ModelList:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", responses=refusals)
    async def retrieve_model(model: str) -> responses.ModelCard:
        service.check_model(model)
        return card


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=_refusals(503))
    async def health() -> responses.Health:
        if (failure := service.engine.failure) is not None:
            raise ApiError(503, failure, kind="server_error", code="unhealthy")
        return {"status": "ok"}

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        return Response(service.engine.metrics.text(), media_type=figures.CONTENT_TYPE)

    html = {"text/html": {"schema": {"type": "string"}}}
    graphs_body: dict[str, Any] = {"model": responses.GraphsState | responses.ReplicaGraphs, "content": html}

    @app.get("/v1/graphs", responses={**_refusals(401, 503), 200: graphs_body})
    async def graphs(request: Request) -> Response:
        state = await service.engine.call(graphs_state)
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(graphs_page(state))
        return JSONResponse(state)


def _drop_422(app: FastAPI) -> None:
    """FastAPI documents a status that this server never sends."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
