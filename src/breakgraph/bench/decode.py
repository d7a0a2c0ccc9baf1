"""One forward over requests with a single new token each, beside the time that reading weights and KV cache takes."""

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
from breakgraph.bench.ceilings import Work, step_work
from breakgraph.bench.config import DecodeBench
from breakgraph.bench.result import Metric, Row
from breakgraph.bench.workloads import BLOCK_SIZE, decode_batch, num_blocks
from breakgraph.runners import decode_runner_class, decode_spec
from breakgraph.runners.base import Forward, Runner


def measure(setting: Setting) -> Iterator[Row]:
    """Rows `decode`, one a step and backend. `bytes_floor`: weights and KV cache at the rate of a copy."""
    config = setting.config
    assert isinstance(config, DecodeBench)
    batches, longest = sorted(config.batch), max(config.context) + 1
    setting.check_length(longest)
    blocks = num_blocks([longest] * batches[-1])
    spec = decode_spec(
        max_num_seqs=batches[-1], max_model_len=longest, num_blocks=blocks, block_size=BLOCK_SIZE, buckets=batches
    )

    def make(backend: Backend, forward: Forward, attention: AttentionBackend) -> Runner:
        return decode_runner_class(backend)(spec, backend, forward, attention, setting.device)

    for fusion in config.fusion:
        yield from _fusion_rows(setting, config, fusion, blocks, make)
        give_memory_back()


def _fusion_rows(
    setting: Setting, config: DecodeBench, fusion: str, blocks: int, make: MakeRunner
) -> Iterator[Row]:  # fmt: skip
    """Of one model, which is gone afterwards: there may be no room for two."""
    model = load(setting, fusion)
    kv = random_kv(setting, model, blocks)
    for attention in config.attention:
        with step_group(setting, model, kv, attention, "decode", make) as group:
            for context in config.context:
                for requests in sorted(config.batch):
                    seed = case_seed(config, (requests, context))
                    batch = decode_batch(requests, context, model.vocab_size, seed)
                    work = step_work(model, [1] * requests, [context + 1] * requests)
                    metrics = group.compare(batch, work, config.rounds)
                    for values in metrics.values():
                        values |= _against_bytes(setting, work, values)
                    shape = {"requests": requests, "context": context}
                    yield from case_rows(group, "decode", shape, fusion, batch, metrics)


def _against_bytes(setting: Setting, work: Work, metrics: dict[str, Metric]) -> dict[str, Metric]:
    known = {"bytes": Metric(value=round(work.num_bytes), unit="bytes")}
    if setting.ceilings is None:
        return known
    floor = setting.ceilings.bytes_ms(work)
    known["bytes_floor"] = Metric(value=floor, unit="ms")
    for name, ratio in (("time", "over_bytes_floor"), ("one_ahead", "one_ahead_over_bytes_floor")):
        if name in metrics:
            known[ratio] = Metric(value=metrics[name].value / floor, unit="ratio")
    return known
