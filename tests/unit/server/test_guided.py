"""Answers of a given form over HTTP: OpenAI's response_format, and vLLM's guided_regex."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from breakgraph import LLM
from breakgraph.engine.guided_process import GuideProcesses
from breakgraph.engine.guided_remote import GuideLimits
from breakgraph.errors import ConfigError
from breakgraph.server import deadline
from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import ascii_tokenizer
from unit.engine.test_guided_process import HASTY, PATIENT
from unit.server.conftest import MODEL, SIZES, RunningServer, running
from unit.server.gate import wait_until
from unit.server.test_malformed import check_error

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With all of ASCII in its vocabulary, and an end of sequence."""
    folder = tmp_path_factory.mktemp("models") / "ascii-llama"
    save_tiny_model("llama", folder, eos_token_id=95)
    ascii_tokenizer().save_pretrained(folder)
    with LLM(str(folder), **SIZES) as llm, running(llm) as server:
        yield server


def is_city(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"city", "size"} and len(value["city"]) <= 6 and value["size"] <= 99


def test_chat_keeps_to_a_schema_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        messages: Any = [{"role": "user", "content": "a city"}]
        return client.chat.completions.create(
            model=MODEL, messages=messages, response_format=FORMAT, n=4, seed=1, max_tokens=90, **options
        )

    whole = [choice.message.content for choice in ask().choices]
    assert all(map(is_city, whole))
    assert len(set(whole)) > 1
    parts = dict.fromkeys(range(4), "")
    for chunk in ask(stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == whole


def test_completions_keep_to_a_regex_beside_free_ones(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt="a", max_tokens=9, temperature=0).choices[0].text
    regex = r"[ab]{3}(, [ab]{3})*\."
    response = client.completions.create(
        model=MODEL, prompt=["a", "b"], seed=3, max_tokens=90, extra_body={"guided_regex": regex}
    )
    for choice in response.choices:
        assert choice.finish_reason == "length" or re.fullmatch(regex, choice.text)
    assert any(choice.finish_reason == "stop" for choice in response.choices)
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=9, temperature=0).choices[0].text == free


def test_any_object(client: openai.OpenAI) -> None:
    response = client.completions.create(
        model=MODEL, prompt="a", n=8, seed=0, max_tokens=120, extra_body={"response_format": {"type": "json_object"}}
    )
    whole = [choice.text for choice in response.choices if choice.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize(
    ("change", "param", "code", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "invalid_value", "not closed"),
        ({"guided_regex": "a" * 120_001}, "guided_regex", "invalid_value", "at most 120000"),
        ({"guided_regex": 1}, "guided_regex", "invalid_value", "string"),
        ({"guided_regex": "é+"}, "guided_regex", "invalid_value", "no token of the vocabulary can begin"),
        ({"guided_regex": "aé"}, None, "invalid_value", "no token with which the answer keeps to its form"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "unsupported_parameter", "ignore_eos"),
        ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex", "unsupported_parameter", "both"),
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value", "yaml"),
        ({"response_format": "json"}, "response_format", "invalid_value", "dict"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "robot"}}}},
            "response_format",
            "invalid_value",
            "robot",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "invalid_value",
            "schema.not",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_kept(
    http: httpx.Client, change: dict[str, Any], param: str | None, code: str, message: str
) -> None:
    for path, prompt in ((COMPLETION, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        body = {"model": MODEL, "max_tokens": 9, "temperature": 0, **prompt, **change}
        error = check_error(http.post(path, json=body), 400)
        assert (error["param"], error["code"]) == (param, code)
        assert message in error["message"]


def test_without_the_extra_the_way_out_is_told(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.service.engine
    monkeypatch.setattr(engine, "grammars", GuideProcesses(engine.tokenizer, 96, [95]))
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    body = {"model": MODEL, "prompt": "a", "guided_regex": "a+"}
    assert "pip install 'breakgraph[guided]'" in check_error(http.post(COMPLETION, json=body), 400)["message"]
    assert http.post(COMPLETION, json={"model": MODEL, "prompt": "a"}).status_code == 200


def test_a_full_server_compiles_nothing(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that wait for their grammar take room, too."""
    engine = server.service.engine
    compiled: list[Any] = []
    may_go_on = threading.Event()

    def compile_later(params: Any) -> None:
        compiled.append(params)
        may_go_on.wait()
        raise ConfigError("not this one")

    monkeypatch.setattr(engine.grammars, "compile", compile_later)
    monkeypatch.setattr(engine._thread, "capacity", 2)
    body = {"model": MODEL, "prompt": "a", "guided_regex": "a+", "n": 2}
    with ThreadPoolExecutor() as pool:
        first = pool.submit(http.post, COMPLETION, json=body)
        wait_until(lambda: len(compiled) == 1)
        refused = http.post(COMPLETION, json=body | {"n": 1})
        may_go_on.set()
        assert "not this one" in check_error(first.result(), 400)["message"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert len(compiled) == 1
    # The room is free again.
    assert "not this one" in check_error(http.post(COMPLETION, json=body), 400)["message"]


def test_compiling_and_answering_have_one_deadline(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    delays: list[float] = []
    grammars = server.service.engine.grammars
    compile_grammar = grammars.compile
    timeout = server.service.config.request_timeout

    def compile_slowly(params: Any) -> Any:
        if now == [0.0]:
            now[0] = timeout + 1
        return compile_grammar(params)

    def timeout_spied(delay: float) -> asyncio.Timeout:
        delays.append(delay)
        return asyncio.timeout(delay)

    with monkeypatch.context() as patches:
        patches.setattr(grammars, "compile", compile_slowly)
        patches.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patches.setattr(deadline, "asyncio", SimpleNamespace(timeout=timeout_spied))
        http.post(COMPLETION, json={"model": MODEL, "prompt": "a", "guided_regex": "a+", "max_tokens": 2})
    assert len(delays) > 1
    assert delays == [timeout] + [-1.0] * (len(delays) - 1)
    wait_until(lambda: server.service.engine._thread.num_live == 0)
    server.assert_idle()


EXPLODES: list[tuple[dict[str, Any], str, GuideLimits, str]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "many",
                    "schema": {
                        "type": "object",
                        "properties": {f"p{i}": {} for i in range(300)},
                        "minProperties": 100,
                    },
                },
            }
        },
        "response_format",
        HASTY,
        "the JSON schema takes more than 1 s of computing to compile; make it smaller",
    ),
    (
        {"guided_regex": "a?" * 20_000},
        "guided_regex",
        PATIENT,
        "the regex takes more than 192 MiB of memory, or more than xgrammar can to compile; make it smaller",
    ),
    (
        {"guided_regex": "((a{0,1000}){0,1000}){0,1000}"},
        "guided_regex",
        PATIENT,
        "more than 0.5 s of computing for one token, or more than 192 MiB of memory; write it without nested",
    ),
]


@pytest.fixture(scope="module")
def limited(server: RunningServer) -> Iterator[dict[GuideLimits, GuideProcesses]]:
    """Grammars with limits that tests can wait for."""
    tokenizer = server.service.engine.tokenizer
    grammars = {limits: GuideProcesses(tokenizer, 96, [95], limits) for limits in (HASTY, PATIENT)}
    yield grammars
    for each in grammars.values():
        each.close()


@pytest.mark.parametrize(("form", "param", "limits", "message"), EXPLODES, ids=["time", "memory", "later"])
def test_a_form_that_explodes_is_refused_and_nobody_waits_for_it(
    server: RunningServer,
    limited: dict[GuideLimits, GuideProcesses],
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    form: dict[str, Any],
    param: str,
    limits: GuideLimits,
    message: str,
) -> None:
    monkeypatch.setattr(server.service.engine, "grammars", limited[limits])
    free = {"model": MODEL, "prompt": "a", "max_tokens": 9, "temperature": 0}
    guided = free | {"max_tokens": 100}
    expected = http.post(COMPLETION, json=free).json()["choices"]
    with ThreadPoolExecutor() as pool:
        exploding = [pool.submit(http.post, COMPLETION, json=guided | form | {"seed": seed}) for seed in range(2)]
        answers = [http.post(COMPLETION, json=free).json()["choices"]]
        while wait(exploding, timeout=0.1).not_done:
            answers.append(http.post(COMPLETION, json=free).json()["choices"])
    for response in exploding:
        error = check_error(response.result(), 400)
        assert message in error["message"]
        assert error["param"] in (param, None)
    assert answers == [expected] * len(answers)
    asked = http.post(COMPLETION, json=free | {"guided_regex": "[ab]{2}"})
    assert re.fullmatch("[ab]{2}", asked.json()["choices"][0]["text"])


def test_a_stream_whose_form_explodes_ends_with_the_error(
    server: RunningServer,
    limited: dict[GuideLimits, GuideProcesses],
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.service.engine, "grammars", limited[PATIENT])
    body = {"model": MODEL, "prompt": "a", "max_tokens": 100, "temperature": 0, "stream": True}
    response = http.post(COMPLETION, json=body | EXPLODES[2][0])
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
    assert response.status_code == 200
    assert set("".join(part["choices"][0]["text"] for part in parts)) == {"a"}
    assert last["error"]["code"] == "invalid_value"
    assert "more than 0.5 s of computing for one token" in last["error"]["message"]


def test_who_asks_for_a_form_that_is_being_compiled_waits_for_that(
    server: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = server.service.engine.grammars
    compile_grammar, compiled = grammars.compile, []
    may_go_on = threading.Event()

    def compile_later(params: Any) -> Any:
        compiled.append(params)
        may_go_on.wait()
        return compile_grammar(params)

    monkeypatch.setattr(grammars, "compile", compile_later)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 9, "temperature": 0, "guided_regex": "[xyz]{3}"}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(http.post, COMPLETION, json=body) for _ in range(3)]
        wait_until(lambda: server.service.engine._num_compiling == 3)
        may_go_on.set()
        texts = {response.result().json()["choices"][0]["text"] for response in asked}
    assert len(compiled) == 1
    assert len(texts) == 1
    assert re.fullmatch("[xyz]{3}", texts.pop())
