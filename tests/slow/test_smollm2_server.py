"""`breakgraph serve` with a real checkpoint, as its users meet it: OpenAI's client and curl, whole and streamed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.timeout(1200)

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The capital of France is"
USER = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 4}
BASE: dict[str, dict[str, Any]] = {COMPLETION: {**GREEDY, "prompt": PROMPT}, CHAT: {**GREEDY, "messages": USER}}
BLOCKS = re.compile(r'breakgraph_kv_blocks{state="(\w+)"} (\d+)')
SIZES = (
    "--device cpu --dtype float32 --max-model-len 256 --max-num-batched-tokens 64 --max-num-seqs 4 "
    "--prefill-buckets 24,64 --decode-buckets 4"
)
"""Most steps have few tokens, which a bucket of 64 would pad at the cost of minutes."""


@dataclass
class Answers:
    """What came back: by number of the answer."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str | None] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    def add(self, body: dict[str, Any]) -> None:
        """One response, or one part of a stream."""
        assert "error" not in body, body
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            index, said = choice["index"], choice.get("message") or choice.get("delta") or choice
            self.texts[index] = self.texts.get(index, "") + (said.get("text") or said.get("content") or "")
            self.reasons[index] = choice["finish_reason"] or self.reasons.get(index)
            logprobs = choice.get("logprobs") or {}
            self.tokens += [entry["token"] for entry in logprobs.get("content") or []] + (logprobs.get("tokens") or [])

    def all_of(self) -> list[Any]:
        assert self.usage is not None
        counts = [self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        return [self.texts, self.reasons, sorted(self.tokens), counts]


def curl(url: str, path: str, content: bytes | None = None, *options: str) -> tuple[int, str]:
    """Status and body."""
    data = [] if content is None else ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    command = ["curl", "-sS", "-N", "-w", "\n%{http_code}", *data, *options, url + path]
    done = subprocess.run(command, input=content, capture_output=True, check=True, timeout=600)
    body, _, status = done.stdout.decode().rpartition("\n")
    return int(status), body


def ask_with_curl(url: str, path: str, body: dict[str, Any]) -> Answers:
    status, text = curl(url, path, json.dumps(body).encode())
    assert status == 200, text
    answers = Answers()
    if not body.get("stream"):
        answers.add(json.loads(text))
        return answers
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    for event in events:
        answers.add(json.loads(event))
    return answers


def ask_with_client(url: str, path: str, body: dict[str, Any]) -> Answers:
    answers, client = Answers(), client_of(url)
    endpoint: Any = client.completions if path == COMPLETION else client.chat.completions
    own = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "guided_regex")
    extra = {name: body[name] for name in own if name in body}
    if path == COMPLETION and "response_format" in body:
        extra["response_format"] = body["response_format"]
    response = endpoint.create(**{k: v for k, v in body.items() if k not in extra}, extra_body=extra)
    for part in response if body.get("stream") else [response]:
        answers.add(part.model_dump())
    return answers


@cache
def client_of(url: str) -> openai.OpenAI:
    """Making one takes longer than most of its answers. Closed with the server."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def url(smollm2_folder: Path) -> Iterator[str]:
    """Of a server in a process of its own, which ends by SIGTERM, with status 0 and with every block free."""
    arguments = ["serve", "--model", "smollm2", "--cache-dir", str(smollm2_folder.parent), "--port", "0"]
    command = [sys.executable, "-m", "breakgraph", *arguments, *SIZES.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving smollm2 on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield found.group(1)
        client_of(found.group(1)).close()
        assert_unharmed(found.group(1))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def assert_unharmed(url: str) -> None:
    """It is healthy, answers as before, and holds no block."""
    assert curl(url, "/health") == (200, '{"status":"ok"}')
    assert ask_with_curl(url, COMPLETION, BASE[COMPLETION]).texts[0].startswith(" Paris")
    found = {state: int(count) for state, count in BLOCKS.findall(curl(url, "/metrics")[1])}
    assert found["free"] == found["usable"] > 0


def says(*words: str) -> Callable[[Answers], bool]:
    return lambda answers: all(word in text for text in answers.texts.values() for word in words)


def ended(reason: str) -> Callable[[Answers], bool]:
    return lambda answers: set(answers.reasons.values()) == {reason}


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}

# (name, paths, parameters, what must hold)
BOTH = (COMPLETION, CHAT)
CASES: list[tuple[str, tuple[str, ...], dict[str, Any], Callable[[Answers], bool]]] = [
    ("greedy", (COMPLETION,), {}, says("Paris")),
    ("greedy chat", (CHAT,), {"max_tokens": 8}, says("Paris")),
    ("max_tokens", BOTH, {"max_tokens": 2}, ended("length")),
    ("end of sequence", (CHAT,), {"max_tokens": 12}, ended("stop")),
    ("stop string", (COMPLETION,), {"stop": ["zzz", "ris"]}, lambda a: a.texts == {0: " Pa"} and ended("stop")(a)),
    ("stop token", (COMPLETION,), {"stop_token_ids": [7042]}, lambda a: a.texts == {0: ""} and ended("stop")(a)),
    ("ignore_eos", (CHAT,), {"max_tokens": 10, "ignore_eos": True}, ended("length")),
    ("n and seed", BOTH, {"n": 2, "seed": 1, "temperature": 1.5}, lambda a: a.texts[0] != a.texts[1]),
    ("top_p", BOTH, {"temperature": 2, "top_p": 0.01, "seed": 2}, says("a")),
    ("top_k", (COMPLETION,), {"temperature": 2, "top_k": 1}, says("Paris")),
    ("min_p", (COMPLETION,), {"temperature": 2, "min_p": 1.0, "seed": 2}, says("Paris")),
    ("penalties", (COMPLETION,), {"presence_penalty": 1, "frequency_penalty": 1}, says("Paris")),
    ("repetition penalty", (COMPLETION,), {"repetition_penalty": 5.0, "prompt": PROMPT + " Paris,"}, lambda a: True),
    ("logprobs", (COMPLETION,), {"logprobs": 2, "max_tokens": 2}, lambda a: a.tokens == [" Paris", "."]),
    ("chat logprobs", (CHAT,), {"logprobs": True, "top_logprobs": 2}, lambda a: "".join(a.tokens) == a.texts[0]),
    ("echo", (COMPLETION,), {"echo": True}, says(f"{PROMPT} Paris")),
    ("echo, logprobs", (COMPLETION,), {"echo": True, "logprobs": 0}, lambda a: "".join(a.tokens) == a.texts[0]),
    (
        "schema",
        BOTH,
        {"response_format": FORMAT, "max_tokens": 20},
        lambda a: json.loads(a.texts[0])["city"] in ("Paris", "Rome"),
    ),
    (
        "regex",
        BOTH,
        {"guided_regex": "[0-9]{3}!", "max_tokens": 9},
        lambda a: bool(re.fullmatch(r"\d{3}!", a.texts[0])),
    ),
    (
        "several prompts",
        (COMPLETION,),
        {"prompt": [PROMPT, "Rome"], "max_tokens": 2},
        lambda a: a.texts.keys() == {0, 1},
    ),
]


@pytest.mark.parametrize(
    ("paths", "parameters", "holds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_client_and_curl_get_the_same_whole_and_streamed(
    url: str, paths: tuple[str, ...], parameters: dict[str, Any], holds: Callable[[Answers], bool]
) -> None:
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    with ThreadPoolExecutor(4) as pool:
        for path in paths:
            whole = BASE[path] | parameters
            asked = [(ask, body) for ask in (ask_with_curl, ask_with_client) for body in (whole, whole | streaming)]
            first, *others = pool.map(lambda one, path=path: one[0](url, path, one[1]), asked)
            assert holds(first), first
            for other in others:
                assert other.all_of() == first.all_of()


def test_models_and_graphs_over_curl(url: str) -> None:
    assert json.loads(curl(url, "/v1/models")[1])["data"][0]["id"] == "smollm2"
    phases = json.loads(curl(url, "/v1/graphs")[1])["phases"]
    assert [phase["hit_rate"] for phase in phases] == [1.0, 1.0]
    assert curl(url, "/v1/graphs", None, "-H", "Accept: text/html")[1].startswith("<!doctype html>")


def changed(path: str, **change: Any) -> tuple[str, bytes, int]:
    return path, json.dumps(BASE[path] | change).encode(), 400


# (path, body, status)
MALFORMED: dict[str, tuple[str, bytes, int]] = {
    "empty": (COMPLETION, b"", 400),
    "no JSON": (CHAT, b"{'model': 'smollm2'}", 400),
    "cut off": (CHAT, json.dumps(BASE[CHAT]).encode()[:-1], 400),
    "a list": (COMPLETION, b"[1, 2]", 400),
    "bad UTF-8": (COMPLETION, b'{"model": "smollm2", "prompt": "\xc3\x28"}', 400),
    "half a surrogate pair": (COMPLETION, b'{"model": "smollm2", "prompt": "\\udc00"}', 400),
    "not a number": (COMPLETION, b'{"model": "smollm2", "prompt": "a", "top_p": NaN}', 400),
    "a huge number": (COMPLETION, b'{"model": "smollm2", "prompt": "a", "max_tokens": 1e300}', 400),
    "a huge integer": changed(COMPLETION, max_tokens=10**40),
    "a prompt of 10 MB": (COMPLETION, json.dumps(BASE[COMPLETION] | {"prompt": "x" * 10_000_000}).encode(), 413),
    "a prompt of 7 MB": changed(COMPLETION, prompt="word " * 1_400_000),
    "a prompt beyond the context": changed(COMPLETION, prompt="word " * 300),
    "more than the context": changed(COMPLETION, max_tokens=256),
    "no prompt": changed(COMPLETION, prompt=None),
    "a token that is none": changed(COMPLETION, prompt=[49152]),
    "a negative token": changed(COMPLETION, prompt=[-1]),
    "text and tokens": changed(COMPLETION, prompt=["a", 1]),
    "no messages": changed(CHAT, messages=[]),
    "a message without a role": changed(CHAT, messages=[{"content": "hi"}]),
    "a message with a number": changed(CHAT, messages=[{"role": "user", "content": 1}]),
    "an image": changed(CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    "negative max_tokens": changed(CHAT, max_tokens=-1),
    "text for a number": changed(CHAT, temperature="0"),
    "a hot temperature": changed(CHAT, temperature=99),
    "best_of": changed(COMPLETION, best_of=3),
    "tools": changed(CHAT, tools=[{"type": "function", "function": {"name": "f"}}]),
    "too many answers": changed(COMPLETION, n=129),
    "an unknown field": changed(COMPLETION, colour="blue"),
    "an empty stop string": changed(CHAT, stop=""),
    "a schema that is none": changed(CHAT, response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
    "a regex that is none": changed(COMPLETION, guided_regex="[a"),
    "another model": (CHAT, json.dumps(BASE[CHAT] | {"model": "gpt-4"}).encode(), 404),
    "another path": ("/v1/embeddings", b"{}", 404),
}


def test_malformed_requests_are_refused_one_by_one_and_harm_nothing(url: str) -> None:
    assert len(MALFORMED) >= 30
    for name, (path, content, status) in MALFORMED.items():
        found, text = curl(url, path, content)
        assert found == status, (name, text)
        error = json.loads(text)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, name
        assert error["type"] == "invalid_request_error", name
        assert 0 < len(error["message"]) < 1000, name
        assert curl(url, "/health")[0] == 200, name
    assert_unharmed(url)


def test_malformed_requests_beside_good_ones_change_no_answer(url: str) -> None:
    small = [case for case in MALFORMED.values() if len(case[1]) < 10_000]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(ask_with_curl, url, COMPLETION, BASE[COMPLETION] | {"max_tokens": 12}) for _ in range(4)]
        statuses = [pool.submit(curl, url, path, content) for path, content, _ in small]
        assert [status.result()[0] for status in statuses] == [case[2] for case in small]
        texts = {answer.result().texts[0] for answer in good}
    assert len(texts) == 1
    assert texts.pop().startswith(" Paris")
