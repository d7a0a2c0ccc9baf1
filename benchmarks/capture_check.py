"""Replays against eager on the same padded batch, at real shapes with random weights, in poisoned memory.

    PYTHONPATH=src python3 benchmarks/capture_check.py --model qwen3-0.6b --out result.json

For each bucket: ragged batches (some with a cached prefix) run eagerly from the runner's static buffers, then the KV
slots they wrote are cleared, every free byte of the pool is filled with NaN patterns, and the plan replays. Logits and
written KV must be equal bit for bit. Then the pool against the largest bucket captured alone, and what the driver
takes beside torch's own counters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from breakgraph.attention import KVCacheBuffers
from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.engine.config import EngineConfig
from breakgraph.engine.engine import Engine
from breakgraph.engine.loading import load_engine
from breakgraph.runners import Runner, StepBatch
from breakgraph.runners.spec import last_rows

BLOCK = 16


def ragged_batch(rng: random.Random, runner: Runner, num_tokens: int, vocab: int, max_len: int) -> StepBatch:
    """`num_tokens` new tokens split at random among requests, about half of them with a cached prefix."""
    fixed = runner.spec.tokens_per_req
    q_lens: list[int] = []
    while sum(q_lens) < num_tokens:
        left = num_tokens - sum(q_lens)
        room = runner.spec.max_num_seqs - len(q_lens)
        size = fixed or (left if room == 1 else rng.choice([1, 7, 64, 300, 2000, left]))
        q_lens.append(min(size, left, max_len))
    seq_lens = [q + (rng.randrange(max_len - q + 1) if fixed or rng.random() < 0.5 else 0) for q in q_lens]
    free = list(range(1, runner.spec.num_blocks))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(-(-n // BLOCK))] for n in seq_lens]
    positions = [p for q, n in zip(q_lens, seq_lens, strict=True) for p in range(n - q, n)]
    slots = [
        table[p // BLOCK] * BLOCK + p % BLOCK
        for table, q, n in zip(tables, q_lens, seq_lens, strict=True)
        for p in range(n - q, n)
    ]
    ids = [rng.randrange(vocab) for _ in positions]
    return StepBatch(
        input_ids=ids, positions=positions, slot_mapping=slots, q_lens=q_lens, seq_lens=seq_lens,
        block_tables=tables, logits_rows=last_rows(q_lens),
    )  # fmt: skip


def written(kv: KVCacheBuffers, slots: torch.Tensor) -> list[torch.Tensor]:
    """Copies of what the step stored, layer by layer."""
    return [t.flatten(0, 1)[slots] for buffers in (kv.key, kv.value) for t in buffers.values()]


def clear(kv: KVCacheBuffers, slots: torch.Tensor) -> None:
    for buffers in (kv.key, kv.value):
        for tensor in buffers.values():
            tensor.flatten(0, 1).index_fill_(0, slots, 0)


@torch.inference_mode()
def check_bucket(engine: Engine, runner: Runner, size: int, sizes: list[int], rng: random.Random) -> Row:
    """One row: replays, how many were wrong, and the times of both ways."""
    kv, max_len = engine.kv, engine.config.sizes.max_model_len
    assert kv is not None
    wrong_logits = wrong_kv = 0
    times: dict[str, list[float]] = {"eager": [], "replay": []}
    for n in sizes:
        batch = ragged_batch(rng, runner, n, engine.facts.vocab_size, max_len)
        slots = torch.tensor(batch.slot_mapping, device=kv.key[0].device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        want = runner.run_padded_eager(batch)
        torch.cuda.synchronize()
        times["eager"].append((time.perf_counter() - start) * 1e3)
        stored = written(kv, slots)
        clear(kv, slots)
        engine.family.poison()
        start = time.perf_counter()
        got = runner.run(batch)
        torch.cuda.synchronize()
        times["replay"].append((time.perf_counter() - start) * 1e3)
        wrong_logits += not torch.equal(got, want)
        wrong_kv += not all(torch.equal(a, b) for a, b in zip(stored, written(kv, slots), strict=True))
        assert bool(want.isfinite().all()), "eager logits are not finite: the comparison would mean nothing"
    replays = runner.stats.replays[size]
    assert replays >= len(sizes), f"{len(sizes)} steps of bucket {size} made {replays} replays"
    report = runner.explain()[runner.spec.key(size)]
    return Row(
        name=f"{runner.spec.phase}[{size}]",
        params={"phase": runner.spec.phase, "bucket": size, "backend": runner.backend.name,
                "attention": runner.attention.name, "sizes": ",".join(map(str, sizes))},
        metrics={
            "replays": Metric(value=len(sizes), unit="count"),
            "wrong_logits": Metric(value=wrong_logits, unit="count"),
            "wrong_kv": Metric(value=wrong_kv, unit="count"),
            "segments": Metric(value=report.num_segments, unit="count"),
            "breaks": Metric(value=report.num_breaks, unit="count"),
            "nodes": Metric(value=sum(s.num_nodes for s in report.steps), unit="count"),
            "activations": Metric(value=report.pool_peak_bytes, unit="bytes"),
            "pool_growth": Metric(value=report.pool_growth_bytes, unit="bytes"),
            "capture": Metric(value=report.capture_sec, unit="s"),
            "eager_padded": Metric(value=statistics.median(times["eager"]), unit="ms"),
            "replay": Metric(value=statistics.median(times["replay"]), unit="ms"),
        },
    )  # fmt: skip


def capture(config: EngineConfig) -> tuple[Engine, dict[str, Metric]]:
    """An engine with everything captured, and what that took."""
    engine = load_engine(config)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    alone = {f"{phase.phase}_largest_alone": phase.pool_bytes for phase in engine.memory.phases}
    start = time.perf_counter()
    engine.capture()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info()[0]
    grown = torch.cuda.memory_reserved() - reserved
    return engine, {
        "capture": Metric(value=seconds, unit="s"),
        "pool": Metric(value=engine.family.pool_bytes, unit="bytes"),
        "outputs": Metric(value=engine.family.output_bytes, unit="bytes"),
        "torch_reserved_growth": Metric(value=grown, unit="bytes"),
        "driver_beyond_torch": Metric(value=taken - grown, unit="bytes"),
        "plans": Metric(value=len(engine.explain()), unit="count"),
        "pool_over_largest": Metric(value=engine.family.pool_bytes / max(alone.values()), unit="ratio"),
        **{name: Metric(value=nbytes, unit="bytes") for name, nbytes in alone.items()},
    }


def sizes_for(runner: Runner, size: int, rng: random.Random, rounds: int) -> list[int]:
    """Live sizes that land in the bucket: both ends, and random ones between."""
    ladder = runner.spec.ladder
    low = ladder[ladder.index(size) - 1] + 1 if ladder.index(size) else 1
    return [size, low, *(rng.randint(low, size) for _ in range(rounds - 2))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5, help="steps a bucket")
    parser.add_argument("--num-blocks", type=int, default=40000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=args.max_model_len,
        max_num_batched_tokens=8192, max_num_seqs=64, block_size=BLOCK, num_gpu_blocks_override=args.num_blocks,
        prefill_buckets=(128, 256, 512, 1024, 2048, 4096, 8192), decode_buckets=(1, 2, 4, 8, 16, 32, 64),
    )  # fmt: skip
    rng = random.Random(0)
    engine, totals = capture(config)
    ratio = totals["pool_over_largest"].value
    assert engine.kv is not None
    for buffers in (engine.kv.key, engine.kv.value):
        for tensor in buffers.values():
            tensor.normal_()
    rows = []
    for runner in engine.runners.values():
        for size in runner.spec.ladder:
            rows.append(check_bucket(engine, runner, size, sizes_for(runner, size, rng, args.rounds), rng))
            metrics = rows[-1].metrics
            print(rows[-1].name, *(f"{k}={m.value:.4g}" for k, m in metrics.items()), flush=True)
    rows.append(Row(name="memory", params={}, metrics=totals))
    print("memory", *(f"{k}={m.value:.4g} {m.unit}" for k, m in totals.items()), flush=True)
    run, where, versions = here(f"python3 benchmarks/capture_check.py {' '.join(sys.argv[1:-2])}", "cuda")
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model=args.model, dtype="bfloat16"), rows=tuple(rows),
        notes=("one wall-clock time a step, host work and metadata included; median of the steps shown",
               "wrong_logits and wrong_kv count steps that are not bit-equal to eager on the same padded batch"),
        excluded=("sampling", "tokenisation"),
    ))  # fmt: skip
    engine.close()
    bad = sum(int(r.metrics[m].value) for r in rows[:-1] for m in ("wrong_logits", "wrong_kv"))
    print("WRONG" if bad or ratio > 1.3 else "all equal", f"pool/largest {ratio:.3f}")
    sys.exit(bool(bad) or ratio > 1.3)


if __name__ == "__main__":
    main()
