"""Two replicas behind one port, one of them killed under load: only its own requests are lost, and it is replaced."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.timeout(600)

NUM_CLIENTS = 8
PROMPTS = [f"{letter}{letter * 2} once upon a time there was {letter}" for letter in "abcdefgh"]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "temperature": 0, "stream": True}
SIZES = (
    "--device cpu --max-num-batched-tokens 32 --max-num-seqs 8 --max-model-len 128 --prefill-buckets 32 "
    "--decode-buckets 8 --num-gpu-blocks-override 65"
)


def descendants(pid: int) -> dict[int, str]:
    """Command lines by process id."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            found[process.pid] = " ".join(process.cmdline())
    return found


def replica_pids(server: int) -> set[int]:
    return {pid for pid, command in descendants(server).items() if command.startswith("ray::ServeReplica")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Its address and its process, which ends by SIGTERM with status 0; nothing of what it started outlives it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model("llama", folder)
    byte_tokenizer().save_pretrained(folder)
    arguments = ["serve", "--model", str(folder), "--served-model-name", "tiny", "--replicas", "2", "--port", "0"]
    command = [sys.executable, "-m", "breakgraph", *arguments, "--drain-timeout", "5", *SIZES.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    started: set[int] = set()
    reading: threading.Thread | None = None
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving tiny on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        reading = threading.Thread(target=process.stderr.read)  # nobody may wait for room in the pipe
        reading.start()
        started |= descendants(process.pid).keys()
        yield found.group(1), process.pid
        started |= descendants(process.pid).keys()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0
        assert [pid for pid in started if _command(pid).startswith("ray::ServeReplica")] == []
    finally:
        with suppress(psutil.NoSuchProcess):
            started |= descendants(process.pid).keys()
        process.kill()
        process.wait()
        for pid in started:
            if "ray" in _command(pid):
                os.kill(pid, signal.SIGKILL)
        if reading is not None:
            reading.join()  # whoever had the pipe is gone
        if process.stderr is not None:
            process.stderr.close()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def http(server: tuple[str, int]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=120) as client:
        yield client


def ask(http: httpx.Client, prompt: str, begun: set[str] | None = None) -> tuple[str, str]:
    """The text, and how it ended: "done", or the code of the error. While it comes, the prompt is in `begun`."""
    begun = set() if begun is None else begun
    try:
        return _ask(http, prompt, begun)
    finally:
        begun.discard(prompt)


def _ask(http: httpx.Client, prompt: str, begun: set[str]) -> tuple[str, str]:
    with http.stream("POST", "/v1/completions", json=BODY | {"prompt": prompt}) as response:
        if response.status_code != 200:
            response.read()
            return "", str(response.json()["error"]["code"])
        text = ""
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return text, "done"
            if line.startswith("data: "):
                event = httpx.Response(200, text=line.removeprefix("data: ")).json()
                if "error" in event:
                    return text, str(event["error"]["code"])
                text += event["choices"][0]["text"]
                begun.add(prompt)
    return text, "cut off"


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def test_nothing_listens_beyond_loopback(server: tuple[str, int], http: httpx.Client) -> None:
    """Ray's own processes neither, those that the first request starts among them."""
    assert ask(http, PROMPTS[0])[1] == "done"
    listening: set[tuple[str, str]] = set()
    for pid, command in {server[1]: "serve", **descendants(server[1])}.items():
        with suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections("inet")
            listening |= {(command, found.laddr.ip) for found in sockets if not found.raddr}
    for part in ("serve", "gcs_server", "raylet/raylet", "ray::ServeReplica", "ray::ServeController"):
        assert any(part in command for command, _ in listening), part
    assert {found for found in listening if not is_loopback(found[1])} == set()


def test_metrics_and_graphs_are_those_of_both(server: tuple[str, int], http: httpx.Client) -> None:
    def replays() -> dict[str, int]:
        replicas = http.get("/v1/graphs").json()["replicas"]
        return {found["replica"]: sum(phase["num_replays"] for phase in found["phases"]) for found in replicas}

    before = replays()
    assert ask(http, "aaaa")[1] == "done"
    after = replays()
    assert len(after) == 2
    assert sum(after.values()) - sum(before.values()) >= BODY["max_tokens"]
    samples = [
        sample.labels["replica"]
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "breakgraph_kv_blocks"
    ]
    assert set(samples) == after.keys()
    page = http.get("/v1/graphs", headers={"Accept": "text/html"}).text
    assert all(f"Replica {name}" in page for name in after)


def stop_amid_answers(pid: int, answers: Counter[str], begun: set[str]) -> bool:
    """Stops a process, which keeps what it is at; whether that is an answer: it has begun, and only others go on.

    Where all of them were there, nobody goes on at all.
    """
    os.kill(pid, signal.SIGSTOP)
    before, last, num_idle, rest = Counter(answers), 0, 0, threading.Event()
    while num_idle < 200 and last < 6 * NUM_CLIENTS:
        rest.wait(0.1)
        gained = {prompt: answers[prompt] - before[prompt] for prompt in PROMPTS}
        num_idle = num_idle + 1 if sum(gained.values()) == last else 0
        last = sum(gained.values())
    return any(prompt in begun and not gained[prompt] for prompt in PROMPTS)


def test_one_of_two_replicas_is_killed_under_load(server: tuple[str, int], http: httpx.Client) -> None:
    url, pid = server
    expected = {prompt: ask(http, prompt) for prompt in PROMPTS}
    assert {how for _, how in expected.values()} == {"done"}
    # The same beginning goes to the replica that has it in its prefix cache.
    for prompt in PROMPTS[:3]:
        body = BODY | {"prompt": prompt, "stream": False, "max_tokens": 1}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0

    before = replica_pids(pid)
    assert len(before) == 2
    victims = itertools.cycle(before)
    num_running = threading.Barrier(NUM_CLIENTS + 1)
    is_over = threading.Event()
    outcomes: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    begun: set[str] = set()
    wrong: list[tuple[str, str]] = []
    lock = threading.Lock()

    def client(prompt: str) -> None:
        num_running.wait()
        with httpx.Client(base_url=url, timeout=120) as own:
            while not is_over.is_set():
                text, how = ask(own, prompt, begun)
                with lock:
                    outcomes[how] += 1
                    answers[prompt] += 1
                    if not expected[prompt][0].startswith(text) or (how == "done" and text != expected[prompt][0]):
                        wrong.append((prompt, text))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(client, prompt) for prompt in PROMPTS]
        num_running.wait()
        while sum(outcomes.values()) < NUM_CLIENTS:
            is_over.wait(0.01)  # the clients need this process
        while not stop_amid_answers(victim := next(victims), answers, begun):
            os.kill(victim, signal.SIGCONT)
        os.kill(victim, signal.SIGKILL)
        while len(now := replica_pids(pid)) < 2 or victim in now:
            is_over.wait(0.1)
        is_over.set()
        for done in clients:
            done.result()
    assert wrong == []
    assert outcomes.keys() <= {"done", "replica_died"}
    assert 0 < outcomes["replica_died"] <= NUM_CLIENTS
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        assert list(pool.map(ask, [http] * NUM_CLIENTS, PROMPTS)) == list(expected.values())
