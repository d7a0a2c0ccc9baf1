"""What no client should send: each gets a status and a body that say what is wrong, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from unit.server.conftest import MODEL

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
OK: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "temperature": 0}
OK_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOO_DEEP = b'{"model": ' + b"[" * 200_000

# (path, what is changed, status, param, code)
CHANGES: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    (COMPLETION, {"max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    (COMPLETION, {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (COMPLETION, {"max_tokens": "7"}, 400, "max_tokens", "invalid_value"),
    (COMPLETION, {"max_tokens": 10**30}, 400, "max_tokens", "invalid_value"),
    (COMPLETION, {"max_tokens": 1_000_000}, 400, "max_tokens", "context_length_exceeded"),
    (COMPLETION, {"max_tokens": True}, 400, "max_tokens", "invalid_value"),
    (COMPLETION, {"temperature": -0.1}, 400, "temperature", "invalid_value"),
    (COMPLETION, {"temperature": 2.1}, 400, "temperature", "invalid_value"),
    (COMPLETION, {"temperature": [1]}, 400, "temperature", "invalid_value"),
    (COMPLETION, {"top_p": 0}, 400, "top_p", "invalid_value"),
    (COMPLETION, {"min_p": 1.1}, 400, "min_p", "invalid_value"),
    (COMPLETION, {"top_k": 1.5}, 400, "top_k", "invalid_value"),
    (COMPLETION, {"presence_penalty": 3}, 400, "presence_penalty", "invalid_value"),
    (COMPLETION, {"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
    (COMPLETION, {"seed": 2**63}, 400, "seed", "invalid_value"),
    (COMPLETION, {"n": 0}, 400, "n", "invalid_value"),
    (COMPLETION, {"n": 10**9}, 400, "n", "invalid_value"),
    (COMPLETION, {"n": 128, "prompt": ["a"] * 100}, 400, "prompt", None),
    (COMPLETION, {"best_of": 2}, 400, "best_of", "unsupported_parameter"),
    (COMPLETION, {"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
    (COMPLETION, {"logit_bias": {"1": 5}}, 400, "logit_bias", "unsupported_parameter"),
    (COMPLETION, {"echo": 1}, 400, "echo", "invalid_value"),
    (COMPLETION, {"logprobs": 6}, 400, "logprobs", "invalid_value"),
    (COMPLETION, {"stop": ""}, 400, "stop", "invalid_value"),
    (COMPLETION, {"stop": ["a"] * 17}, 400, "stop", "invalid_value"),
    (COMPLETION, {"stop_token_ids": [-1]}, 400, "stop_token_ids", "invalid_value"),
    (COMPLETION, {"stream": "yes"}, 400, "stream", "invalid_value"),
    (COMPLETION, {"stream_options": {"include_usage": True}}, 400, "stream_options", "unsupported_parameter"),
    (COMPLETION, {"no_such_thing": 1}, 400, "no_such_thing", "unknown_parameter"),
    (COMPLETION, {"prompt": ""}, 400, "prompt", None),
    (COMPLETION, {"prompt": []}, 400, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt", None),
    (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [96]}, 400, "prompt", None),
    (COMPLETION, {"prompt": [10**20]}, 400, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": "x" * 128}, 400, "prompt", "context_length_exceeded"),
    (COMPLETION, {"prompt": "x" * 1_000_000}, 400, "prompt", "context_length_exceeded"),
    (COMPLETION, {"prompt": "x" * 10_000_000}, 413, None, "request_too_large"),
    (COMPLETION, {"prompt": None}, 400, "prompt", "invalid_value"),
    (COMPLETION, {"model": "\ud800"}, 404, "model", "model_not_found"),
    (COMPLETION, {"model": "another"}, 404, "model", "model_not_found"),
    (COMPLETION, {"model": None}, 400, "model", "invalid_value"),
    (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"store": True}, 400, "store", "unsupported_parameter"),
    (CHAT, {"metadata": {"a": "b"}}, 400, "metadata", "unsupported_parameter"),
    (CHAT, {"service_tier": "flex"}, 400, "service_tier", "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "invalid_value"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "invalid_value"),
    (CHAT, {"response_format": {"type": "yaml"}}, 400, "response_format", "invalid_value"),
    (CHAT, {"top_logprobs": 2}, 400, "top_logprobs", "unsupported_parameter"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    (CHAT, {"prompt": "hi"}, 400, "prompt", "unknown_parameter"),
]

# (body, headers, status)
RAW: dict[str, tuple[bytes, dict[str, str], int]] = {
    "nothing": (b"", {}, 400),
    "no JSON": (b"hello", {}, 400),
    "cut off": (json.dumps(OK).encode()[:-5], {}, 400),
    "bad UTF-8": (b'{"model": "tiny", "prompt": "\xff\xfe"}', {}, 400),
    "half a surrogate pair": (b'{"model": "tiny", "prompt": "\\ud800"}', {}, 400),
    "half a surrogate pair as model": (b'{"model": "\\ud800", "prompt": "a", "messages": "a"}', {}, 400),
    "half a surrogate pair as name": (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', {}, 400),
    "a name of a million letters": (b'{"model": "tiny", "' + b"a" * 1_000_000 + b'": 1}', {}, 400),
    "a list": (b"[]", {}, 400),
    "null": (b"null", {}, 400),
    "not a number": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', {}, 400),
    "infinite": (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', {}, 400),
    "thousands of digits": (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400),
    "deeply nested": (TOO_DEEP, {}, 400),
    "another type": (json.dumps(OK).encode(), {"Content-Type": "text/plain"}, 400),
    "a form": (b"model=tiny&prompt=hi", {"Content-Type": "application/x-www-form-urlencoded"}, 400),
}


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 1000
    return error


def check_serving(http: httpx.Client) -> None:
    assert http.post(COMPLETION, json=OK).status_code == 200


@pytest.mark.parametrize(("path", "change", "status", "param", "code"), CHANGES, ids=lambda value: str(value)[:40])
def test_wrong_values(
    http: httpx.Client, path: str, change: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    body = (OK if path == COMPLETION else OK_CHAT) | change
    for stream in ({}, {"stream": True}):
        if "stream" not in change and "stream_options" not in change:
            body = body | stream
        content = json.dumps(body).encode()
        error = check_error(http.post(path, content=content, headers={"Content-Type": "application/json"}), status)
        assert (error["param"], error["code"]) == (param, code)
    check_serving(http)


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, name: str) -> None:
    body, headers, status = RAW[name]
    check_error(http.post(path, content=body, headers={"Content-Type": "application/json", **headers}), status)
    check_serving(http)


def test_a_body_without_length_is_limited_too(http: httpx.Client) -> None:
    response = http.post(COMPLETION, content=(b"x" * 1_000_000 for _ in range(10)))
    assert check_error(response, 413)["code"] == "request_too_large"
    check_serving(http)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", COMPLETION, 405, f"GET is not allowed for {COMPLETION}, POST is"),
        ("DELETE", "/v1/models", 405, "DELETE is not allowed for /v1/models, GET is"),
        ("GET", "/v1/embeddings", 404, "there is nothing at /v1/embeddings; GET /openapi.json lists what there is"),
        ("GET", "/", 404, "there is nothing at /; GET /openapi.json lists what there is"),
    ],
)
def test_wrong_paths_and_methods(http: httpx.Client, method: str, path: str, status: int, message: str) -> None:
    assert check_error(http.request(method, path), status)["message"] == message


def test_where_there_are_forms_to_choose_from_all_are_named(http: httpx.Client) -> None:
    message = check_error(http.post(COMPLETION, json=OK | {"prompt": []}), 400)["message"]
    assert message.startswith("prompt: Input should be a valid string, or List should have at least 1 item")


def test_what_asks_for_nothing_is_taken(http: httpx.Client) -> None:
    neutral = {
        "store": False,
        "metadata": None,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
    }
    assert http.post(COMPLETION, json=OK | neutral | {"n": None, "stop": None, "seed": None}).status_code == 200
