"""What a user would pick instead, each run in a process of its own, where it can run."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
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
    """`measure(task)` of a module in a new process."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measured, module, task).result()
        except BrokenProcessPool:
            return "its process died; what it printed above says more"


def _measured(module: str, task: PeerTask) -> list[Row] | str:
    """Runs in the other process. Any exception is an answer: no peer may end the benchmark."""
    try:
        rows: list[Row] = importlib.import_module(module).measure(task)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return rows


def peer_notes(names: Iterable[str]) -> list[str]:
    """Versions of those that are installed."""
    versions = {name: installed_version(_PACKAGES[name]) for name in names}
    return [f"peer {name}: {_PACKAGES[name]} {version}" for name, version in versions.items() if version]
