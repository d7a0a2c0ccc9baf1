"""How many bytes the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable

import torch

CPU_KV_BYTES = 2 << 30
"""The emulated device has no memory of its own to measure; this much of the host's is taken at most."""

GRAPH_OVERHEAD_BYTES = 512 << 20
"""Driver memory of the captured graphs, which torch's counters don't show."""


def available_kv_bytes(device: torch.device, utilization: float, run_largest_step: Callable[[], None]) -> int:
    """Bytes for the KV cache, once the weights are loaded.

    Args:
        utilization: share of the GPU's whole memory that this process, and whoever else is on it, may fill.
        run_largest_step: an eager step of the largest size; its peak is what activations need. Called on CUDA only.
    """
    if device.type != "cuda":
        return CPU_KV_BYTES
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Twice: once in the pool that all plans share, once for the steps that run eagerly beside it.
    reserved = 2 * activation_bytes + GRAPH_OVERHEAD_BYTES
    return int(total * utilization) - (total - free) - reserved
