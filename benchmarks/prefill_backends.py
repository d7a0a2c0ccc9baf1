"""One prefill step as full graph, as breakable graph and eagerly: interleaved, with the GPU's busy time beside them.

    PYTHONPATH=src python3 benchmarks/prefill_backends.py --model qwen3-8b --out result.json

A step is what a runner does with a batch on the host: attention metadata, the model's body, logits of each request's
last token. Random weights. The full graph has request slots, the breakable one any number of requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from breakgraph.attention import KVCacheBuffers, make_attention
from breakgraph.backends import make_backend
from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.graph import PlanFamily
from breakgraph.models import load_model
from breakgraph.runners import PrefillRunner, Runner, SlottedPrefillRunner, StepBatch, prefill_spec
from breakgraph.runners.spec import last_rows

BLOCK = 16
LIMITS = {128: 1.15, 512: 1.05, 2048: 1.03, 8192: 1.03}
"""Breakable over full, at most."""


def even_batch(num_tokens: int, num_reqs: int, vocab: int, first_block: int = 1) -> StepBatch:
    """`num_tokens` new tokens in `num_reqs` prompts of the same length, none of them cached."""
    q_lens = [num_tokens // num_reqs] * num_reqs
    per_req = -(-q_lens[0] // BLOCK)
    tables = [np.arange(first_block + i * per_req, first_block + (i + 1) * per_req) for i in range(num_reqs)]
    positions = [np.arange(q) for q in q_lens]
    slots = [table[p // BLOCK] * BLOCK + p % BLOCK for table, p in zip(tables, positions, strict=True)]
    generator = torch.Generator().manual_seed(num_tokens + num_reqs)
    return StepBatch(
        input_ids=torch.randint(vocab, (num_tokens,), generator=generator).numpy(),
        positions=np.concatenate(positions), slot_mapping=np.concatenate(slots), q_lens=q_lens, seq_lens=q_lens,
        block_tables=tables, logits_rows=last_rows(q_lens),
    )  # fmt: skip


class Sides:
    """The runners, each with a plan family of its own, on one model and one cache."""

    def __init__(self, model: str, attention: str, buckets: tuple[int, ...], slots: int) -> None:
        self.model = load_model(model, dtype=torch.bfloat16, device="cuda", load_format="dummy")
        top = buckets[-1]
        num_blocks = top // BLOCK + slots + 1
        kv = KVCacheBuffers.allocate(self.model.layers, num_blocks, BLOCK, torch.bfloat16, "cuda")
        self.attention = make_attention(attention, "cuda", torch.bfloat16, self.model.layers)
        self.attention.bind(kv)
        common = {
            "max_num_batched_tokens": top, "max_num_seqs": slots, "max_model_len": top, "num_blocks": num_blocks,
            "block_size": BLOCK, "buckets": buckets,
        }  # fmt: skip
        plain, slotted = prefill_spec(**common), prefill_spec(**common, request_slots=slots)
        self.families: list[PlanFamily] = []
        self.runners: dict[str, Runner] = {
            "full": self._runner(SlottedPrefillRunner, slotted, "full"),
            "breakable": self._runner(PrefillRunner, plain, "breakable"),
            "eager": self._runner(PrefillRunner, plain, "eager"),
        }

    def _runner(self, runner_class: type[Runner], spec: object, backend: str) -> Runner:
        family = PlanFamily("cuda")
        self.families.append(family)

        def forward(fields: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model.forward(fields["input_ids"], fields["positions"], fields["logits_rows"])

        runner = runner_class(spec, make_backend(backend, family), forward, self.attention, "cuda")
        runner.allocate()
        runner.capture()
        return runner

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()
        for family in self.families:
            family.close()


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until the results are there, and until the host is free."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, (host - start) * 1e3


def gpu_busy_ms(run: Callable[[], object], rounds: int = 3) -> float:
    """Time of all kernels and copies of one run: the floor of any way to launch them."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / rounds / 1e3


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two logits, in units of the largest logit."""
    return ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def case(sides: Sides, num_tokens: int, num_reqs: int, rounds: int) -> Row:
    batch = even_batch(num_tokens, num_reqs, sides.model.vocab_size)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        name: (lambda runner=runner: runner.run(batch)) for name, runner in sides.runners.items()
    }
    for family in sides.families:
        family.poison()
    logits = {name: run().clone() for name, run in runs.items()}
    assert bool(logits["eager"].isfinite().all()), "logits are not finite: equality would mean nothing"
    walls: dict[str, list[float]] = {name: [] for name in runs}
    hosts: dict[str, list[float]] = {name: [] for name in runs}
    eager_rounds = max(5, rounds // 5)
    for index in range(rounds + 1):
        for name, run in runs.items():
            if name == "eager" and index > eager_rounds:
                continue
            wall, host = timed(run)
            if index:  # the first of each is not counted
                walls[name].append(wall)
                hosts[name].append(host)
    median = {name: statistics.median(values) for name, values in walls.items()}
    ratios = [b / f for b, f in zip(walls["breakable"], walls["full"], strict=True)]
    metrics = {}
    for name, values in walls.items():
        metrics[name] = Metric(value=median[name], unit="ms")
        metrics[f"{name}_p10"] = Metric(value=percentile(values, 0.1), unit="ms")
        metrics[f"{name}_p90"] = Metric(value=percentile(values, 0.9), unit="ms")
        metrics[f"{name}_host"] = Metric(value=statistics.median(hosts[name]), unit="ms")
    metrics |= {
        "gpu_busy_full": Metric(value=gpu_busy_ms(runs["full"]), unit="ms"),
        "gpu_busy_breakable": Metric(value=gpu_busy_ms(runs["breakable"]), unit="ms"),
        "breakable_over_full": Metric(value=median["breakable"] / median["full"], unit="ratio"),
        "breakable_over_full_paired": Metric(value=statistics.median(ratios), unit="ratio"),
        "eager_over_breakable": Metric(value=median["eager"] / median["breakable"], unit="ratio"),
        "full_off_breakable": Metric(value=off(logits["full"], logits["breakable"]), unit="ratio"),
        "full_equals_breakable": Metric(value=torch.equal(logits["full"], logits["breakable"]), unit="bool"),
    }
    return Row(name=f"{num_tokens} tokens, {num_reqs} requests",
               params={"tokens": num_tokens, "requests": num_reqs, "rounds": rounds}, metrics=metrics)  # fmt: skip


def show(row: Row) -> None:
    m = {name: metric.value for name, metric in row.metrics.items()}
    print(
        f"{row.params['tokens']:>5} {row.params['requests']:>3}  full {m['full']:8.3f} [{m['full_p10']:.3f}, "
        f"{m['full_p90']:.3f}]  breakable {m['breakable']:8.3f} [{m['breakable_p10']:.3f}, {m['breakable_p90']:.3f}] "
        f"host {m['breakable_host']:.3f}  eager {m['eager']:8.2f}  busy {m['gpu_busy_full']:.3f}/"
        f"{m['gpu_busy_breakable']:.3f}  b/f {m['breakable_over_full']:.3f} off {m['full_off_breakable']:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sides = Sides(args.model, args.attention, tuple(LIMITS), slots=16)
    print(f"{args.model}, attention {args.attention}, ms [p10, p90]")
    rows = []
    with torch.inference_mode():
        for tokens in LIMITS:
            for reqs in (1, 4, 16):
                rows.append(case(sides, tokens, reqs, args.rounds if tokens < 8192 else args.rounds // 4))
                show(rows[-1])
    sides.close()
    run, where, versions = here(f"python3 benchmarks/prefill_backends.py {' '.join(sys.argv[1:-2])}", "cuda")
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model=args.model, dtype="bfloat16"), rows=tuple(rows),
        notes=("full, breakable and eager take turns; medians, the first turn left out; host: until run() returns",
               f"attention {args.attention} in all three; 16 request slots; buckets {', '.join(map(str, LIMITS))}"),
        excluded=("sampling", "tokenisation"),
    ))  # fmt: skip
    over = [r.name for r in rows if r.metrics["breakable_over_full"].value > LIMITS[int(r.params["tokens"])]]  # type: ignore[arg-type]
    unequal = [r.name for r in rows if not r.metrics["full_equals_breakable"].value]
    print(f"over the limit: {over or 'none'}; not bit-equal: {unequal or 'none'}")
    sys.exit(bool(unequal) and args.attention != "flashinfer")


if __name__ == "__main__":
    main()
