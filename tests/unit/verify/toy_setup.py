"""A toy decoder behind a runner, captured, with blocks to verify it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from breakgraph.attention import KVCacheBuffers, make_attention
from breakgraph.backends import make_backend
from breakgraph.graph import PlanFamily
from breakgraph.runners import DecodeRunner, PhaseSpec, PrefillRunner, Runner, SlottedPrefillRunner
from breakgraph.runners.base import Forward
from breakgraph.verify import VerifySummary, verify_runners
from breakgraph.verify.batches import Limits
from unit.runners.fakes import BLOCK_SIZE, NUM_BLOCKS, make_decode_spec, make_prefill_spec
from unit.runners.toy_model import LAYERS, MAX_LEN, VOCAB, ToyModel, new_cache

LIMITS = Limits(blocks=range(1, NUM_BLOCKS), vocab_size=VOCAB, max_model_len=MAX_LEN)

PHASES: dict[str, tuple[type[Runner], Callable[[], PhaseSpec], str, str]] = {
    "prefill": (PrefillRunner, lambda: make_prefill_spec(buckets=(4, 16)), "breakable", "sdpa"),
    "prefill-full": (
        SlottedPrefillRunner, lambda: make_prefill_spec(buckets=(4, 16), request_slots=4), "full", "sdpa",
    ),
    "decode": (DecodeRunner, lambda: make_decode_spec(buckets=(2, 8)), "full", "sdpa"),
    "decode-breakable": (DecodeRunner, lambda: make_decode_spec(buckets=(2, 8)), "breakable", "sdpa"),
}  # fmt: skip
"""By name: runner, spec, backend, attention."""


@contextmanager
def toy_runner(
    phase: str, device: torch.device, forward: Forward | None = None
) -> Iterator[tuple[Runner, KVCacheBuffers]]:
    """A captured runner on a cache of its own, and the cache."""
    runner_class, make_spec, backend, attention_name = PHASES[phase]
    attention = make_attention(
        attention_name, device, torch.float32, LAYERS, block_size=BLOCK_SIZE,
        in_graph=["decode"] if backend == "full" else [],
    )  # fmt: skip
    kv = new_cache(device, NUM_BLOCKS)
    attention.bind(kv)
    with PlanFamily(device) as family:
        runner = runner_class(
            make_spec(), make_backend(backend, family), forward or ToyModel(device).forward, attention, device
        )
        runner.allocate()
        runner.warm_up()
        runner.capture()
        yield runner, kv
        runner.close()


def verified(phase: str, device: torch.device, forward: Forward | None = None) -> VerifySummary:
    """The verification of one runner."""
    with toy_runner(phase, device, forward) as (runner, kv):
        return verify_runners([runner], kv, LIMITS)
