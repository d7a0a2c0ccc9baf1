"""One forward over prompts: attention metadata, the model's body, logits of each request's last token."""

from __future__ import annotations

from collections.abc import Iterator

from breakgraph.attention import AttentionBackend
from breakgraph.backends import Backend
from breakgraph.bench.arms import (
    MakeRunner,
    Setting,
    case_rows,
    case_seed,
    give_memory_back,
    load,
    random_kv,
    step_group,
)
from breakgraph.bench.ceilings import step_work
from breakgraph.bench.config import PrefillBench
from breakgraph.bench.result import Row
from breakgraph.bench.workloads import BLOCK_SIZE, even_lens, num_blocks, prefill_batch, prefill_rounds
from breakgraph.runners import prefill_runner_class, prefill_spec
from breakgraph.runners.base import Forward, Runner


def measure(setting: Setting) -> Iterator[Row]:
    """Rows `prefill`, one a step and backend. Full graphs have as many request slots as the most requests asked for."""
    config = setting.config
    assert isinstance(config, PrefillBench)
    top, slots = max(config.tokens), max(config.requests)
    setting.check_length(-(-top // min(config.requests)))
    # Every step fits: blocks that are not full are one a request.
    blocks = num_blocks([top]) + slots
    common = {
        "max_num_batched_tokens": top,
        "max_num_seqs": slots,
        "max_model_len": top,
        "num_blocks": blocks,
        "block_size": BLOCK_SIZE,
    }

    def make(backend: Backend, forward: Forward, attention: AttentionBackend) -> Runner:
        buckets = sorted(config.tokens)
        has_slots = backend.records_breaks or backend.chooses
        spec = prefill_spec(**common, buckets=buckets, request_slots=slots if has_slots else None)
        return prefill_runner_class(backend)(spec, backend, forward, attention, setting.device)

    for fusion in config.fusion:
        yield from _fusion_rows(setting, config, fusion, blocks, make)
        give_memory_back()


def _fusion_rows(
    setting: Setting, config: PrefillBench, fusion: str, blocks: int, make: MakeRunner
) -> Iterator[Row]:  # fmt: skip
    """Of one model, which is gone afterwards: there may be no room for two."""
    model = load(setting, fusion)
    kv = random_kv(setting, model, blocks)
    for attention in config.attention:
        with step_group(setting, model, kv, attention, "prefill", make) as group:
            for tokens in sorted(config.tokens):
                for requests in config.requests:
                    seed = case_seed(config, (tokens, requests))
                    batch = prefill_batch(tokens, requests, model.vocab_size, seed)
                    lens = even_lens(tokens, requests)
                    work = step_work(model, lens, lens)
                    metrics = group.compare(batch, work, prefill_rounds(tokens, config.rounds))
                    shape = {"tokens": tokens, "requests": requests}
                    yield from case_rows(group, "prefill", shape, fusion, batch, metrics)
