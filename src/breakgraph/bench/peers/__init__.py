"""What a user would pick instead, each run in a process of its own, where it can run."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from breakgraph.bench.config import BenchConfig
from breakgraph.bench.result import Row, installed_version

if TYPE_CHECKING:
    from breakgraph.bench.arms import Setting

_WHERE = {
    ("prefill", "torch.compile"): "breakgraph.bench.peers.compiled",
    ("prefill", "transformers"): "breakgraph.bench.peers.plain",
    ("prefill", "vllm"): "breakgraph.bench.peers.vllm_api",
    ("serve", "transformers"): "breakgraph.bench.peers.continuous",
    ("serve", "vllm"): "breakgraph.bench.peers.vllm_api",
}
"""By kind of benchmark and name."""
_PACKAGES = {"torch.compile": "torch", "transformers": "transformers", "vllm": "vllm"}
_GRACE_SEC = 5.0
"""For a peer to end by itself when the user has interrupted the benchmark."""


@dataclass(frozen=True)
class PeerTask:
    """What goes into the other process."""

    config: BenchConfig
    dtype: str


def run_peer(name: str, setting: Setting) -> list[Row] | str:
    """Its rows, or why there are none. The process ends with the call, and its memory is free then."""
    if setting.ceilings is None:
        return "the emulated device claims no speed, so there is nothing to compare"
    task = PeerTask(setting.config, str(setting.dtype).removeprefix("torch."))
    return run_apart(_WHERE[setting.config.kind, name], task)


def run_apart(module: str, task: PeerTask) -> list[Row] | str:
    """`measure(task)` of a module in a new process. An interrupt leaves no process behind, whatever that was at."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(sending, module, task))
    with receiving, sending:
        try:
            process.start()
            sending.close()
            answer = _received(receiving)
            process.join()
        except BaseException:
            if process.pid is not None:
                try:
                    process.join(_GRACE_SEC)
                finally:
                    process.kill()
                    process.join()
            raise
    return answer


def _received(receiving: Connection) -> list[Row] | str:
    try:
        answer: list[Row] | str = receiving.recv()
    except EOFError:
        return "its process died; what it printed above says more"
    return answer


def _measure_into(sending: Connection, module: str, task: PeerTask) -> None:
    """Runs in the other process. Any exception is an answer: no peer may end the benchmark."""
    with suppress(KeyboardInterrupt):  # the benchmark has it, too
        try:
            answer: list[Row] | str = importlib.import_module(module).measure(task)
        except Exception as error:
            answer = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        sending.send(answer)


def peer_notes(names: Iterable[str]) -> list[str]:
    """Versions of those that are installed."""
    versions = {name: installed_version(_PACKAGES[name]) for name in names}
    return [f"peer {name}: {_PACKAGES[name]} {version}" for name, version in versions.items() if version]
