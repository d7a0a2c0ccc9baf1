"""A tiny llama behind a real server on a loopback port, and what it should answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from breakgraph import LLM
from breakgraph.server.config import ServerConfig
from breakgraph.server.run import make_server, make_service
from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import byte_tokenizer
from unit.server.gate import wait_until

MODEL = "tiny"
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "prefill_buckets": (32,),
    "decode_buckets": (8,),
    "num_gpu_blocks_override": 65,
    "use_tqdm": False,
}


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model("llama", folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(llama_folder: Path) -> Iterator[LLM]:
    """While a server has it, only the server may use it."""
    with LLM(str(llama_folder), **SIZES) as llm:
        yield llm


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.service = make_service(llm, config)
        self.server: uvicorn.Server = make_server(self.service)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join()
        self._socket.close()

    def stats(self) -> dict[str, Any]:
        """Of the engine, between two of its steps."""
        return self.service.engine._thread.call(lambda engine: engine.stats()).result()

    def assert_idle(self) -> None:
        """No request and no block is left. The loop may still be on its way out of the last answer."""
        wait_until(lambda: self.service.engine._queues == {})
        stats = self.stats()
        assert (stats["num_running"], stats["num_waiting"], self.service.engine._thread.num_live) == (0, 0, 0)
        assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1


@contextmanager
def running(llm: LLM, **options: Any) -> Iterator[RunningServer]:
    server = RunningServer(llm, ServerConfig(port=0, served_model_name=MODEL, **options))
    try:
        with httpx.Client(base_url=server.url) as client:
            while client.get("/health").status_code != 200:  # pragma: no cover
                pass
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[RunningServer]:
    with running(llm) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, without retries."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.assert_idle()


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.assert_idle()
