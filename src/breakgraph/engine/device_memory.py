"""What the engine's graphs and steps need, measured before the KV cache exists, and what is left for the cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from breakgraph.engine.sampler import History, Sampler, token_logprobs
from breakgraph.engine.sampling import MAX_LOGPROBS, SamplingParams
from breakgraph.graph import Peak, get_device
from breakgraph.runners.memory import PhaseMemory

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 2 << 30
"""The emulated device has no memory of its own to measure; this much of the host's is taken at most."""

ALLOCATION_GRANULE = 2 << 20
"""torch rounds large allocations up to this."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes beside weights and KV cache, as estimated from measurements. What is not measured counts as 0.

    Attributes:
        phases: What each phase's runner measured.
        sampler: Drawing a token for each of `max_num_seqs` requests, with every filter on.
        pool_runs: Pieces that the pool is made of before the first capture.
        pool_bytes: What the pool holds with the largest bucket of each phase in it, which all others share.
    """

    phases: tuple[PhaseMemory, ...]
    sampler: Peak
    pool_runs: tuple[int, ...]
    pool_bytes: int

    @property
    def output_bytes(self) -> int:
        """The outputs' buffer, shared like the pool."""
        return max(phase.output_bytes for phase in self.phases)

    @property
    def input_bytes(self) -> int:
        """The runners' static buffers."""
        return sum(phase.input_bytes for phase in self.phases)

    @property
    def driver_bytes(self) -> int | None:
        """What the driver keeps for all plans; None when that is not measured."""
        known = [p.num_plans * p.driver_bytes_per_plan for p in self.phases if p.driver_bytes_per_plan is not None]
        return sum(known) if known else None

    @property
    def graph_bytes(self) -> int:
        """What stays allocated while the engine serves."""
        return self.pool_bytes + self.output_bytes + self.input_bytes + (self.driver_bytes or 0)

    @property
    def step_bytes(self) -> int:
        """What a step takes for itself beside the graphs: breaks of a replay, the sampler, and eager steps where a
        phase can have some. One of them at a time."""
        peaks = [self.sampler, *(phase.replay for phase in self.phases)]
        peaks += [phase.eager for phase in self.phases if phase.runs_eagerly]
        return max(peak.reserved_bytes or 0 for peak in peaks)

    @property
    def warm_up_bytes(self) -> int:
        """What a capture takes beside the graphs: its warm-up is an eager step."""
        return max((phase.eager.reserved_bytes or 0 for phase in self.phases if phase.num_plans), default=0)

    @property
    def activation_peak_bytes(self) -> int | None:
        """What the largest eager step allocates, which is what every engine without graphs has to have free."""
        return _largest(phase.eager for phase in self.phases)

    @property
    def activation_peak_avoided_bytes(self) -> int | None:
        """The part of `activation_peak_bytes` that no step allocates any more: what replays allocate outside the pool,
        and what eager steps do where they can happen, is taken off."""
        peak = self.activation_peak_bytes
        left = _largest(phase.eager if phase.runs_eagerly else phase.replay for phase in self.phases)
        return None if peak is None or left is None else max(0, peak - left)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; None is not measured."""
        return {
            "pool_bytes": self.pool_bytes,
            "pool_runs_bytes": list(self.pool_runs),
            "output_bytes": self.output_bytes,
            "input_bytes": self.input_bytes,
            "driver_bytes": self.driver_bytes,
            "step_bytes": self.step_bytes,
            "warm_up_bytes": self.warm_up_bytes,
            "activation_peak_bytes": self.activation_peak_bytes,
            "activation_peak_avoided_bytes": self.activation_peak_avoided_bytes,
            "phases": {phase.phase: phase.to_dict() for phase in self.phases},
        }


def _largest(peaks: Any) -> int | None:
    known = [peak.allocated_bytes for peak in peaks if peak.allocated_bytes is not None]
    return max(known) if known else None


def measure_sampler(device: torch.device, max_num_seqs: int, vocab_size: int, dtype: torch.dtype) -> Peak:
    """What sampling takes for `max_num_seqs` requests that use every filter, penalties, guides and log probabilities.

    Empty on the emulated device.
    """
    measuring = get_device(device)
    if measuring.emulated:
        return Peak()
    logits_RV = torch.zeros(max_num_seqs, vocab_size, dtype=dtype, device=device)
    rows = list(range(max_num_seqs))
    filters = {"top_p": 0.5, "top_k": max(1, vocab_size // 2), "min_p": 0.1}
    masks = dict.fromkeys(rows, torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32))
    params = [SamplingParams(repetition_penalty=1.1, **filters)] * max_num_seqs  # type: ignore[arg-type]
    histories = [History([0], [0])] * max_num_seqs
    sampler = Sampler(device, seed=0)

    def sample() -> None:
        drawn = sampler.draw(logits_RV[rows], params, [None] * max_num_seqs, histories, masks)
        token_logprobs(logits_RV[rows], drawn.wait(), [MAX_LOGPROBS] * max_num_seqs)

    sample()
    return measuring.peak_of(sample)


def kv_budget(device: torch.device, utilization: float, plan: MemoryPlan, num_tensors: int) -> int:
    """Bytes for the KV cache, once the weights are loaded.

    Two situations have to fit: serving, inside the share; and capturing, when the share may be exceeded for a moment,
    but not the memory that is there.

    Args:
        utilization: Share of the GPU's whole memory that this process, and whoever else is on it, may fill.
        num_tensors: Allocations that the cache consists of.
    """
    if device.type != "cuda":
        return CPU_KV_BYTES
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    rounding = num_tensors * ALLOCATION_GRANULE
    serving = int(total * utilization) - (total - free) - plan.step_bytes
    capturing = free - plan.warm_up_bytes
    return min(serving, capturing) - plan.graph_bytes - rounding


def free_bytes(device: torch.device) -> int:
    """More than a KV cache can ever have."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_KV_BYTES


def log_plan(plan: MemoryPlan) -> None:
    """One line, in MiB."""
    if not any(phase.num_plans for phase in plan.phases):
        logger.info("memory: no graphs; a step takes %s beside weights and KV cache", mib(plan.activation_peak_bytes))
        return
    logger.info(
        "memory: graphs take %s (pool %s, outputs %s, inputs %s, driver %s), a step %s beside them, their capture %s; "
        "activation peak avoided %s",
        mib(plan.graph_bytes), mib(plan.pool_bytes), mib(plan.output_bytes), mib(plan.input_bytes),
        mib(plan.driver_bytes), mib(plan.step_bytes), mib(plan.warm_up_bytes),
        mib(plan.activation_peak_avoided_bytes),
    )  # fmt: skip


def mib(nbytes: int | None) -> str:
    """For people."""
    return "not measured" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"
