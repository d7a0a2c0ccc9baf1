"""Building the ladder: how long each bucket takes, what it needs, and what a replay of the largest is made of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from breakgraph.backends import backend_class
from breakgraph.bench.arms import Setting, describe, give_memory_back
from breakgraph.bench.comparison import measure_comparison
from breakgraph.bench.config import CaptureBench
from breakgraph.bench.result import Metric, Row, Scalar
from breakgraph.bench.serve import open_llm
from breakgraph.engine.llm import LLM
from breakgraph.engine.memory_report import BucketMemory, MemoryReport
from breakgraph.graph import PlanReport
from breakgraph.runners.base import Runner

REPLAYS = 4
"""Enough for a plan to know the host time of its steps."""


def measure(setting: Setting) -> Iterator[Row]:
    """Rows `capture` (all of an arm), `bucket`, and `step` (of the largest bucket of each phase)."""
    config = setting.config
    assert isinstance(config, CaptureBench)
    if config.compare:
        yield from measure_comparison(setting)
        return
    for fusion in config.fusion:
        for attention in config.attention:
            for backend in config.backends:
                if not backend_class(backend).captures:
                    setting.leave_out(backend, "it captures nothing")
                    continue
                yield from _arm(setting, config, backend, fusion, attention)


def _arm(setting: Setting, config: CaptureBench, backend: str, fusion: str, attention: str) -> list[Row]:
    """Rows of the fastest of the rounds, each with an engine of its own."""
    options = {
        name: getattr(config, name)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "prefill_buckets", "decode_buckets")
    }
    best: list[Row] = []
    best_sec = float("inf")
    for _ in range(config.rounds):
        started = time.perf_counter()
        llm = open_llm(setting, backend, fusion, attention, options)
        start_sec = time.perf_counter() - started
        if llm is None:
            return []
        with llm:
            seconds = sum(runner.stats.capture_sec for runner in llm.engine.runners.values())
            if seconds < best_sec:
                times = {"time": seconds, "start": start_sec} if setting.ceilings is not None else {}
                best, best_sec = _rows(llm, backend, fusion, times), seconds
        del llm
        give_memory_back()
    setting.tell(describe(best[0]))
    return best


def _rows(llm: LLM, backend: str, fusion: str, times: dict[str, float]) -> list[Row]:
    memory, is_timed = llm.memory_report(), bool(times)
    used = " + ".join(dict.fromkeys(llm.stats()["attention"].values()))
    arm: dict[str, Scalar] = {"backend": backend, "fusion": fusion, "attention": used}
    rows = [Row(name="capture", params=arm, metrics=_totals(memory, times))]
    reports = {(key.phase, key.size): report for key, report in llm.explain().items()}
    for bucket in memory.buckets:
        report = reports[bucket.phase, bucket.bucket]
        params = arm | {"phase": bucket.phase, "bucket": bucket.bucket}
        rows.append(Row(name="bucket", params=params, metrics=_bucket(bucket, report, is_timed)))
    for phase, runner in llm.engine.runners.items():
        report = _replayed(runner)
        rows += [
            Row(
                name="step",
                params=arm
                | {"phase": phase, "bucket": runner.spec.ladder[-1], "index": index, "kind": step.kind}
                | {"step": step.name},
                metrics=_step(step, is_timed),
            )
            for index, step in enumerate(report.steps)
        ]
    return rows


def _totals(memory: MemoryReport, times: dict[str, float]) -> dict[str, Metric]:
    metrics = {name: Metric(value=seconds, unit="s") for name, seconds in times.items()}
    metrics["buckets"] = Metric(value=len(memory.buckets), unit="count")
    sizes = {
        "pool": memory.pool_bytes,
        "outputs": memory.output_bytes,
        "inputs": memory.input_bytes,
        "driver": memory.driver_bytes,
        "graphs": memory.graph_bytes,
    }
    return metrics | _bytes(sizes)


def _bucket(bucket: BucketMemory, report: PlanReport, is_timed: bool) -> dict[str, Metric]:
    metrics = {"time": Metric(value=report.capture_sec, unit="s")} if is_timed else {}
    nodes = sum(step.num_nodes for step in report.steps)
    counts = {"segments": report.num_segments, "breaks": report.num_breaks, "nodes": nodes}
    metrics |= {name: Metric(value=count, unit="count") for name, count in counts.items()}
    sizes = {
        "activations": bucket.activation_bytes,
        "boundaries": bucket.boundary_bytes,
        "pool_growth": bucket.pool_growth_bytes,
        "driver": bucket.driver_bytes,
    }
    return metrics | _bytes(sizes)


def _step(step: Any, is_timed: bool) -> dict[str, Metric]:
    metrics = {"nodes": Metric(value=step.num_nodes, unit="count")} | _bytes({"copied": step.boundary_bytes})
    if is_timed and step.host_sec is not None:
        metrics["host"] = Metric(value=step.host_sec * 1e6, unit="us")
    return metrics


def _replayed(runner: Runner) -> PlanReport:
    """The largest bucket's plan, after enough replays to know its host times."""
    key = runner.spec.key(runner.spec.ladder[-1])
    with runner.in_bucket(runner.spec.dummy_batch(key.size)):
        for _ in range(REPLAYS):
            runner.backend.replay(key)
    return runner.explain()[key]


def _bytes(sizes: dict[str, int | None]) -> dict[str, Metric]:
    """Without what is not measured."""
    return {name: Metric(value=size, unit="bytes") for name, size in sizes.items() if size is not None}
