"""Refusals and failures in the form of OpenAI's API: a status and {"error": {...}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from breakgraph.errors import BreakgraphError, ClosedError, ConfigError, PromptTooLongError, QueueFullError

logger = logging.getLogger(__name__)

_BAD_REQUEST = "invalid_request_error"
_MAX_MESSAGE = 500
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


class ApiError(Exception):
    """What a client is told: status, message, the parameter at fault, and a code that programs can compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": self.kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def request_timeout(timeout_sec: float) -> ApiError:
    """408"""
    message = f"the request was given up after {timeout_sec:g} seconds"
    return ApiError(408, message, kind="timeout_error", code="request_timeout")


def _printable(text: str) -> str:
    """What clients sent may be long, or no text at all."""
    shown = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return shown.encode(errors="replace").decode()


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception; what is nobody's fault but ours is logged and not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code=_CODES.get(error.status_code), headers=error.headers)
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": "1"}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is going down", kind="server_error", code="shutting_down")
    logger.error("a request failed", exc_info=error)
    message = str(error) if isinstance(error, BreakgraphError) else "the server failed; its log says more"
    return ApiError(500, message, kind="server_error", code="internal_error")


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first of what is wrong, by its path in the body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no valid JSON: {first['ctx']['error']}", code="invalid_json")
    path = _path(first)
    message, context = first["msg"], first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {_join(path)}", param=_join(path), code="unknown_parameter")
    if first["type"] == "unsupported":
        return ApiError(400, message, param=context["param"], code="unsupported_parameter")
    if not path:
        return ApiError(400, f"the body must be a JSON object, sent as application/json: {message}")
    # Where there are several forms to choose from, each says why it is none of them.
    messages = dict.fromkeys(other["msg"] for other in error.errors() if _path(other) == path)
    return ApiError(400, f"{_join(path)}: {', or '.join(messages)}", param=str(path[0]), code="invalid_value")


def _path(fault: dict[str, Any]) -> list[str | int]:
    """Where in the body, without the forms that were tried there."""
    return [part for part in fault["loc"][1:] if not isinstance(part, str) or part.isidentifier()]


def _join(path: list[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _no_route(request: Request, error: Exception) -> ApiError | None:
    """What to say of a path or a method that is not there."""
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        return None
    method, path = request.method, request.url.path
    if error.status_code == 405:
        message = f"{method} is not allowed for {path}, {Headers(error.headers).get('allow', 'another method')} is"
    else:
        message = f"there is nothing at {path[:200]}; GET /openapi.json lists what there is"
    return ApiError(error.status_code, message, code=_CODES[error.status_code], headers=error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Whatever is refused gets OpenAI's form, unknown paths and methods too. All else is for AnswerFailures."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return (_no_route(request, error) or as_api_error(error)).response()

    for kind in (ApiError, RequestValidationError, HTTPException, BreakgraphError):
        app.add_exception_handler(kind, handle)
