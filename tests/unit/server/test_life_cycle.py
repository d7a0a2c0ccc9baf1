"""Clients that leave, full queues, requests that take too long, failures, keys, and the end of the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import breakgraph
from breakgraph import LLM
from breakgraph.engine.request import Request
from breakgraph.errors import ClosedError, ConfigError
from breakgraph.server.config import ServerConfig
from breakgraph.server.run import make_service
from unit.server.conftest import MODEL, SIZES, RunningServer, running
from unit.server.gate import Gate, wait_until

COMPLETION = "/v1/completions"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 100, "temperature": 0}


def open_stream(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which the response has begun."""
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(
    llm: LLM, server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = Gate(llm.engine, monkeypatch)
    connection = open_stream(server, LONG | {"n": 3, "stream": stream})
    thread = server.service.engine._thread
    wait_until(lambda: thread.num_live == 3)
    gate.allow(5)
    wait_until(lambda: all(len(request.output_token_ids) == 5 for request in thread._live.values()))
    requests = list(thread._live.values())
    connection.close()
    wait_until(lambda: server.service.engine._queues == {})
    gate.allow(1)  # a step may wait at the gate; the next one has nobody left
    wait_until(lambda: thread.num_live == 0)
    server.assert_idle()
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert {len(request.output_token_ids) for request in requests} <= {5, 6}


def test_a_client_that_leaves_while_waiting_is_forgotten(
    llm: LLM, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(llm.engine, monkeypatch)
    thread = server.service.engine._thread
    first = open_stream(server, LONG | {"n": 8})
    wait_until(lambda: thread.num_live == 8)
    second = open_stream(server, LONG)
    wait_until(lambda: thread.num_live == 9)
    for connection in (second, first):
        connection.close()
    wait_until(lambda: server.service.engine._queues == {})
    gate.allow(3)
    wait_until(lambda: thread.num_live == 0)
    server.assert_idle()


def test_a_full_queue_is_429_and_all_else_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llm, max_waiting=1) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        gate = Gate(llm.engine, monkeypatch)
        body = LONG | {"max_tokens": 2}
        with ThreadPoolExecutor() as pool:
            fits = pool.submit(http.post, COMPLETION, json=body | {"n": 9})
            wait_until(lambda: server.service.engine._thread.num_live == 9)
            for stream in (False, True):
                refused = http.post(COMPLETION, json=body | {"stream": stream})
                assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            too_many = http.post(COMPLETION, json=body | {"n": 10})
            assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
            gate.allow(1000)
            assert fits.result().status_code == 200
        assert http.post(COMPLETION, json=body).status_code == 200
        server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with running(llm, request_timeout=0.2) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        gate = Gate(llm.engine, monkeypatch)
        response = http.post(COMPLETION, json=LONG | {"stream": stream})
        last = response.text.strip().splitlines()[-1].removeprefix("data: ")
        assert response.status_code == (200 if stream else 408)
        assert json.loads(last)["error"]["code"] == "request_timeout"
        gate.allow(1)
        wait_until(lambda: server.service.engine._thread.num_live == 0)
        server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_is_a_500_for_its_requests_and_shows_in_health(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        with monkeypatch.context() as patch:

            def failing() -> list[Request]:
                raise RuntimeError("injected")

            patch.setattr(llm.engine, "step", failing)
            for count in range(1, 4):
                response = http.post(COMPLETION, json=LONG | {"stream": stream})
                assert response.status_code == (200 if stream else 500)
                error = json.loads(response.text.strip().removeprefix("data: "))["error"]
                assert (error["type"], error["code"]) == ("server_error", "internal_error")
                assert "injected" not in error["message"]
                assert http.get("/health").status_code == (200 if count < 3 else 503)
        assert http.post(COMPLETION, json=LONG | {"max_tokens": 2}).status_code == 200
        assert http.get("/health").status_code == 200
        server.assert_idle()


def test_what_does_not_end_in_time_is_dropped_at_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llm, drain_timeout=0) as server:
        gate = Gate(llm.engine, monkeypatch)
        connection = open_stream(server, LONG)
        wait_until(lambda: server.service.engine._thread.num_live == 1)
        server.server.should_exit = True
        wait_until(lambda: server.service.engine._queues == {})
        gate.allow(1)
        server.stop()
        with pytest.raises(ClosedError):
            server.stats()
    connection.close()
    stats = llm.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1


def test_the_api_key_guards_v1_and_nothing_else(llm: LLM) -> None:
    with running(llm, api_key="s3cret") as server, httpx.Client(base_url=server.url) as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer é"},
        ):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in ("/v1/models", "/v1/graphs", "/v1/nowhere"):
                refused = http.get(path, headers=raw)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get("/v1/models", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert [http.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]


def test_a_model_without_tokenizer_is_refused(llama_folder: Path) -> None:
    options = SIZES | {"load_format": "dummy", "prefill_backend": "eager", "decode_backend": "eager"}
    with LLM(str(llama_folder), **options) as llm, pytest.raises(ConfigError, match="a server needs a tokenizer"):
        make_service(llm, ServerConfig())


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"host": ""},
        {"max_waiting": -1},
        {"request_timeout": 0},
        {"request_timeout": float("inf")},
        {"drain_timeout": 1.5},
        {"api_key": ""},
        {"served_model_name": ""},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


@pytest.fixture
def process(llama_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`breakgraph serve` as a user runs it, and its address."""
    environ = {**os.environ, "PYTHONPATH": str(Path(breakgraph.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    sizes = ["--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--max-model-len", "400"]
    command = [
        sys.executable,
        "-m",
        "breakgraph",
        "serve",
        "--model",
        str(llama_folder),
        "--device",
        "cpu",
        "--port",
        "0",
    ]
    command += [*sizes, "--prefill-backend", "eager", "--decode-buckets", "2", "--served-model-name", MODEL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as running:
        assert running.stderr is not None
        lines = iter(running.stderr.readline, "")
        url = next((line.split()[-1] for line in lines if line.startswith("serving ")), None)
        assert url is not None, "it ended before it served"
        yield running, url
        if running.poll() is None:
            running.kill()


def test_sigterm_lets_a_stream_end_and_takes_nothing_new(process: tuple[subprocess.Popen[str], str]) -> None:
    running, url = process
    body = LONG | {"max_tokens": 390, "stream": True}
    with httpx.Client(base_url=url, timeout=60) as http, http.stream("POST", COMPLETION, json=body) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        running.send_signal(signal.SIGTERM)
        events += [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    reasons = [json.loads(event.removeprefix("data: "))["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[-1] == "length"
    assert running.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:  # refused, or reset while the port was being closed
        return False
    return True


def test_a_second_ctrl_c_drops_a_stream_and_says_no_more(process: tuple[subprocess.Popen[str], str]) -> None:
    running, url = process
    body = LONG | {"max_tokens": 390, "stream": True}
    with httpx.Client(base_url=url, timeout=60) as http, http.stream("POST", COMPLETION, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running.send_signal(signal.SIGINT)
        while is_listening(url):
            pass
        running.send_signal(signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert running.wait() == 0
    assert running.stderr is not None
    assert running.stderr.read() == ""
