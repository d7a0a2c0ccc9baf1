"""What the server costs beside its engine: time per request and per token at 1, 32 and 256 streams.

    PYTHONPATH=src python3 benchmarks/server_overhead.py --out result.json

The engine is a dummy: scheduler, tokenizer and thread are those of a real one, but its steps run nothing. They wait for
the next tick of `--step-ms` and give each running request one token of ordinary English. So a token is due at the same
moment for all streams, as it is after a real step, and what passes until its event is handed to the socket is the
server: publishing, the event loop, detokenising, JSON. A request is timed from its arrival in the application until it
is in the engine's queue: parsing, checks, chat template, tokenising.

Clients are a process of their own that reads and forgets. Each stream asks anew until the time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import LlamaConfig

from breakgraph import LLM
from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.engine.engine import Engine
from breakgraph.engine.engine_thread import TokenEvent
from breakgraph.engine.request import Request
from breakgraph.models.smollm2 import ensure_smollm2
from breakgraph.models.source import DEFAULT_CACHE_DIR
from breakgraph.server import generation
from breakgraph.server.config import ServerConfig
from breakgraph.server.run import make_server, make_service
from breakgraph.server.service import Service

STREAMS = (1, 32, 256)
WARM_UP_SEC = 3.0
MAX_TOKENS = 100
PROMPT = "Tell me what a lighthouse keeper does all day, and why somebody would choose such a life. " * 4
ANSWER = "The keeper trims the lamp, writes down the weather, and waits for the boats that come home late. " * 10
END_OF_STREAM = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Watch:
    """Around the application: what passes before a request is queued, and between a token and its event."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._arrived: ContextVar[float] = ContextVar("arrived")
        self._taken: ContextVar[list[float]] = ContextVar("taken")
        self.due_of: dict[str, list[float]] = {}
        self.request_sec: list[float] = []
        self.token_sec: list[float] = []
        self.num_events = 0
        self._submit = service.engine.submit
        service.engine.submit = self._timed_submit  # type: ignore[method-assign]
        take = generation._Answer.take

        def watched_take(answer: Any, index: int, event: TokenEvent) -> generation.Delta:
            self._taken.get().append(self.due_of[event.request.request_id][answer.num_tokens])
            return take(answer, index, event)

        generation._Answer.take = watched_take  # type: ignore[method-assign]

    def _timed_submit(self, requests: Sequence[Request]) -> Any:
        self.due_of[requests[0].request_id] = []
        queue = self._submit(requests)
        self.request_sec.append(time.perf_counter() - self._arrived.get())
        return queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._arrived.set(time.perf_counter())
        taken: list[float] = []
        self._taken.set(taken)

        async def timed_send(message: Message) -> None:
            await send(message)
            now = time.perf_counter()
            self.token_sec.extend(now - due for due in taken)
            self.num_events += bool(taken)
            taken.clear()

        await self._app(scope, receive, timed_send)


def make_dummy(engine: Engine, watch: Watch, step_sec: float) -> None:
    """Takes the model out of the engine's steps."""
    assert engine.tokenizer is not None
    token_ids = engine.tokenizer(ANSWER).input_ids

    def step(meanwhile: object) -> list[Request]:
        scheduled = engine.scheduler.schedule()
        assert scheduled is not None
        time.sleep(step_sec - time.perf_counter() % step_sec)
        drawn = [token_ids[len(row.request.output_token_ids)] if row.needs_sample else None for row in scheduled.rows]
        finished = engine.scheduler.commit(scheduled, drawn)
        now = time.perf_counter()
        for row, token_id in zip(scheduled.rows, drawn, strict=True):
            if token_id is not None:
                watch.due_of[row.request.request_id].append(now)
        return finished

    engine.step = step  # type: ignore[method-assign]


def run_clients(port: int, num_streams: int, seconds: float) -> None:
    """In a process of its own."""
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"model": "dummy", "messages": messages, "max_tokens": MAX_TOKENS, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def one(end: float, delay: float) -> None:
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while time.perf_counter() < end:
            writer.write(request)
            await reader.readuntil(END_OF_STREAM)
        writer.close()

    async def all_of_them() -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(one(end, WARM_UP_SEC * index / num_streams) for index in range(num_streams)))

    asyncio.run(all_of_them())


def measure(watch: Watch, cpu_sec: Any, port: int, num_streams: int, args: argparse.Namespace) -> Row:
    clients = multiprocessing.get_context("spawn").Process(
        target=run_clients, args=(port, num_streams, WARM_UP_SEC + args.seconds)
    )
    clients.start()
    while len(watch.token_sec) < num_streams:
        time.sleep(0.01)
    time.sleep(WARM_UP_SEC)
    watch.request_sec.clear()
    watch.token_sec.clear()
    watch.num_events = 0
    before = cpu_sec()
    clients.join()
    used = cpu_sec() - before
    assert clients.exitcode == 0, f"the clients ended with {clients.exitcode}"
    times = {"request": watch.request_sec, "token": watch.token_sec}
    metrics = {
        f"{name}_p{share}": Metric(value=nearest_rank(values, share) * 1e3, unit="ms")
        for name, values in times.items()
        for share in (50, 99)
    }
    metrics["cpu_per_token"] = Metric(value=used / len(watch.token_sec) * 1e6, unit="us")
    metrics["requests"] = Metric(value=len(watch.request_sec), unit="count")
    metrics["events"] = Metric(value=watch.num_events, unit="count")
    metrics["tokens"] = Metric(value=len(watch.token_sec), unit="count")
    watch.token_sec.clear()
    print(num_streams, {name: metric.value for name, metric in metrics.items()}, flush=True)
    return Row(name="server overhead", params={"streams": num_streams, "step_ms": args.step_ms}, metrics=metrics)


def nearest_rank(values: Sequence[float], share: int) -> float:
    return sorted(values)[math.ceil(share / 100 * len(values)) - 1]


def dummy_model(folder: Path) -> None:
    """SmolLM2's tokenizer and a model of its vocabulary that is never run for an answer."""
    source = ensure_smollm2(DEFAULT_CACHE_DIR.expanduser())
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=49152, max_position_embeddings=2048, tie_word_embeddings=True, **shape)
    config.architectures = ["LlamaForCausalLM"]
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the dummy engine")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured for each number of streams")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backends = {"prefill_backend": "eager", "decode_backend": "eager"}
    sizes = {"max_num_seqs": STREAMS[-1], "max_model_len": 512, "max_num_batched_tokens": 8192}
    with tempfile.TemporaryDirectory() as folder:
        dummy_model(Path(folder))
        with LLM(folder, device="cpu", use_tqdm=False, **backends, **sizes) as llm:
            service = make_service(llm, ServerConfig(port=0, served_model_name="dummy"))
            server = make_server(service)
            watch = Watch(server.config.app, service)
            server.config.app = watch
            make_dummy(llm.engine, watch, args.step_ms / 1e3)
            listening = socket.create_server(("127.0.0.1", 0), backlog=512)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            while not server.started:
                time.sleep(0.01)

            def cpu_sec() -> float:
                """Of the event loop's thread."""

                async def read() -> float:
                    return time.thread_time()

                assert service.engine._loop is not None
                return asyncio.run_coroutine_threadsafe(read(), service.engine._loop).result()

            try:
                port = listening.getsockname()[1]
                rows = [measure(watch, cpu_sec, port, num_streams, args) for num_streams in STREAMS]
            finally:
                server.should_exit = True
                thread.join()
                listening.close()
    run, where, versions = here(
        f"python3 benchmarks/server_overhead.py --step-ms {args.step_ms:g} --seconds {args.seconds:g}", "cpu"
    )
    result = Result(
        run=run,
        where=where,
        versions=versions,
        shape=Shape(model={"name": "none: a dummy engine with SmolLM2's tokenizer"}, dtype="float32"),
        rows=tuple(rows),
        notes=(
            "token: from the end of the step to the last byte of the token's event handed to the socket",
            "request: from its arrival in the application to its place in the engine's queue",
            "cpu_per_token: CPU time of the event loop's thread, requests included, for each token",
            "two cores, shared by server, dummy engine and clients, and with other processes",
        ),
        excluded=("the engine's steps", "the kernel's part of the network"),
    )
    if args.out is not None:
        write_result(args.out, result)


if __name__ == "__main__":
    main()
