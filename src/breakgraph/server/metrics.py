"""Figures for Prometheus: what clients see, and what the engine and its graphs do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from breakgraph.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """All metrics of one server, in a registry of their own. Times are seconds."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "breakgraph_http_requests", "Responses by path and status", ["path", "status"], registry=self.registry
        )
        self.answers = Counter(
            "breakgraph_answers", "Answers that ended, by reason", ["finish_reason"], registry=self.registry
        )
        self.generated_tokens = Counter(
            "breakgraph_generated_tokens", "Tokens of answers, as clients get them", registry=self.registry
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From the request to its first token", _REQUEST_BUCKETS
        )
        self.inter_token = self._histogram("inter_token", "From one token of an answer to the next", _TOKEN_BUCKETS)
        self.answer_time = self._histogram("answer", "From the request to the end of an answer", _REQUEST_BUCKETS)
        self.registry.register(_EngineFigures(engine))

    def _histogram(self, name: str, about: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"breakgraph_{name}_seconds", about, buckets=tuple(buckets), registry=self.registry)

    def start_answer(self) -> AnswerTiming:
        return AnswerTiming(self)

    def families(self) -> list[Metric]:
        """All figures as they are now."""
        return list(self.registry.collect())

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def text_of_replicas(families: Mapping[str, Iterable[Metric]]) -> bytes:
    """The exposition format of the figures of several servers by name, each sample with its server as `replica`."""
    merged: dict[str, Metric] = {}
    for replica, its_families in families.items():
        for family in its_families:
            target = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            target.samples += [s._replace(labels={"replica": replica, **s.labels}) for s in family.samples]
    registry = CollectorRegistry()
    registry.register(_Given(list(merged.values())))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class AnswerTiming:
    """The times of one answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._last_token: float | None = None

    def token(self) -> None:
        now = time.perf_counter()
        if self._last_token is None:
            self._metrics.first_token.observe(now - self._started)
        else:
            self._metrics.inter_token.observe(now - self._last_token)
        self._last_token = now
        self._metrics.generated_tokens.inc()

    def end(self, finish_reason: str) -> None:
        self._metrics.answers.labels(finish_reason).inc()
        self._metrics.answer_time.observe(time.perf_counter() - self._started)


class _EngineFigures(Collector):
    """Read when they are asked for, beside the engine's thread: single numbers and copies, each right on its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        if engine.kv is None:  # closed
            return
        scheduler = engine.scheduler
        yield _gauge("requests_running", "Answers in the engine's steps", len(scheduler.running))
        yield _gauge("requests_waiting", "Answers in the engine's queue", len(scheduler.waiting))
        blocks = GaugeMetricFamily(
            "breakgraph_kv_blocks", "KV blocks by state; free ones may be cached too", labels=["state"]
        )
        blocks.add_metric(["usable"], scheduler.allocator.num_usable)
        blocks.add_metric(["free"], scheduler.allocator.num_free)
        blocks.add_metric(["cached"], len(scheduler.allocator.prefix_cache))
        yield blocks
        yield _counter("prompt_tokens", "Prompt tokens of answers that started", scheduler.num_prompt_tokens)
        yield _counter("prefix_cached_tokens", "Those found in the prefix cache", scheduler.num_prefix_cached_tokens)
        yield _counter("preemptions", "Answers that gave up their blocks for others", scheduler.num_preemptions)
        yield from self._graph_figures()
        yield from self._ahead_figures()
        memory = GaugeMetricFamily("breakgraph_memory_bytes", "Memory by what holds it", labels=["kind"])
        memory.add_metric(["graph_pool"], engine.family.pool_bytes)
        memory.add_metric(["graph_outputs"], engine.family.output_bytes)
        memory.add_metric(["kv_cache"], engine.kv.num_bytes)
        memory.add_metric(["weights"], engine.facts.weight_bytes)
        yield memory

    def _graph_figures(self) -> Iterator[Metric]:
        replays = CounterMetricFamily(
            "breakgraph_graph_replays", "Steps replayed, by bucket", labels=["phase", "bucket"]
        )
        eager = CounterMetricFamily(
            "breakgraph_eager_steps", "Steps run eagerly, by reason", labels=["phase", "reason"]
        )
        padded = CounterMetricFamily("breakgraph_padded_tokens", "Tokens computed for padding", labels=["phase"])
        for phase, runner in self._engine.runners.items():
            for bucket, count in dict(runner.stats.replays).items():
                replays.add_metric([phase, str(bucket)], count)
            for reason, count in dict(runner.stats.eager_steps).items():
                eager.add_metric([phase, reason.value], count)
            padded.add_metric([phase], runner.stats.num_padded_tokens)
        yield from (replays, eager, padded)

    def _ahead_figures(self) -> Iterator[Metric]:
        ahead = self._engine.ahead.stats()
        yield _counter("steps_ahead", "Decode steps launched ahead of their tokens", ahead["num_launched"])
        yield _counter("void_rows", "Rows of those steps of which nothing was kept", ahead["num_void_rows"])
        others = CounterMetricFamily(
            "breakgraph_steps_not_ahead", "Steps that had none launched behind them, by reason", labels=["reason"]
        )
        for reason, count in ahead["num_not_launched_by_reason"].items():
            others.add_metric([reason], count)
        yield others


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"breakgraph_{name}", about, value)


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"breakgraph_{name}", about, value)
