"""Listening: from an open LLM to a served port, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from breakgraph.engine.llm import LLM
from breakgraph.errors import ConfigError
from breakgraph.server.app import create_app
from breakgraph.server.async_engine import AsyncEngine
from breakgraph.server.config import ServerConfig
from breakgraph.server.metrics import Metrics
from breakgraph.server.service import Service

_BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""


def make_service(llm: LLM, config: ServerConfig) -> Service:
    """Raises ConfigError for a model without a tokenizer."""
    metrics = Metrics(llm.engine)
    return Service(AsyncEngine(llm.engine, max_waiting=config.max_waiting, metrics=metrics), config)


def make_server(service: Service) -> uvicorn.Server:
    """Not started. Told to stop, it closes the port, lets requests end for `drain_timeout`, and aborts the rest."""
    return _make_server(create_app(service), service.config)


def _make_server(app: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=config.drain_timeout,
        )
    )


def bind(config: ServerConfig) -> socket.socket:
    """Takes the address, before a model is loaded for nothing; clients are refused until somebody listens.

    Raises ConfigError when it cannot be had.
    """
    host, port = config.host, config.port
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; give another --host or --port") from error
    return bound


def serve(llm: LLM, config: ServerConfig, bound: socket.socket) -> None:
    """Serves at the address that was bound until the process is told to stop; the LLM stays open.

    Raises ConfigError when somebody else listens there meanwhile or the model has no tokenizer.
    """
    service = make_service(llm, config)
    try:
        listen_and_serve(create_app(service), config, bound, service.model)
    finally:
        service.engine.close()  # a second Ctrl-C leaves it open


def listen_and_serve(app: ASGIApp, config: ServerConfig, bound: socket.socket, model: str) -> None:
    """Serves an application until the process is told to stop; says on standard error where it is.

    Raises ConfigError when somebody else listens there.
    """
    server = _make_server(app, config)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; give another --host or --port") from error
    print(f"serving {model} on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
    # The server raises the signal again when it is done: by then there is nothing left to stop.
    previous = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_news(record: logging.LogRecord) -> bool:
    """What is cancelled when time is up, or by a second Ctrl-C, is told of by libraries with a traceback each."""
    raised = record.exc_info[0] if record.exc_info else None
    is_cancelled = raised is not None and issubclass(raised, asyncio.CancelledError)
    return not is_cancelled and not record.getMessage().rstrip().endswith(asyncio.CancelledError.__name__)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
