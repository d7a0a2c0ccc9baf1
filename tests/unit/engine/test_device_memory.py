"""The arithmetic of the KV budget, on a pretended GPU."""

from __future__ import annotations

import pytest
import torch

from breakgraph.engine.device_memory import CPU_KV_BYTES, GRAPH_OVERHEAD_BYTES, available_kv_bytes

GIB = 1 << 30


def test_a_cpu_has_a_fixed_budget_and_runs_no_step() -> None:
    def fail() -> None:
        raise AssertionError("no step is needed")

    assert available_kv_bytes(torch.device("cpu"), 0.9, fail) == CPU_KV_BYTES


def test_on_cuda_weights_activations_and_graphs_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, activations, total = 10 * GIB, 3 * GIB, 80 * GIB
    calls: list[str] = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: weights)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: weights + activations)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - weights, total))

    available = available_kv_bytes(torch.device("cuda", 0), 0.5, lambda: calls.append("step"))

    assert available == 40 * GIB - weights - 2 * activations - GRAPH_OVERHEAD_BYTES
    # The peak is that of the step, and it is read after the step has run.
    assert calls.index("reset_peak_memory_stats") < calls.index("step") < len(calls) - 1
    assert "synchronize" in calls[calls.index("step") :]
