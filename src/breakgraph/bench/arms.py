"""What is compared: backends of one model on one cache, with one way to fuse and one attention."""

from __future__ import annotations

import gc
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from breakgraph.attention import AttentionBackend, KVCacheBuffers, make_attention
from breakgraph.attention.base import DECODE
from breakgraph.backends import Backend, backend_class, make_backend
from breakgraph.bench.ceilings import Ceilings, Work
from breakgraph.bench.config import BenchConfig
from breakgraph.bench.profiler import GpuProfile, KernelTime, gpu_profile
from breakgraph.bench.result import Metric, Row, Scalar
from breakgraph.bench.timing import Samples, back_to_back, interleaved, one_ahead, paired_ratio
from breakgraph.bench.workloads import BLOCK_SIZE
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily
from breakgraph.models import HFModel, fuse, load_model
from breakgraph.models.routing import watch_routing
from breakgraph.models.support import build_model
from breakgraph.runners.base import Forward, Runner

if TYPE_CHECKING:
    from breakgraph.models.source import ModelSource
    from breakgraph.runners import StepBatch

EAGER, FULL = "eager", "full"
_NUM_KERNELS = 12
_NAME_LENGTH = 120
"""Templates in C++ write pages."""


@dataclass
class Setting:
    """Where and on what a benchmark runs. `ceilings` is None on the emulated device, where nothing is timed."""

    config: BenchConfig
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings | None
    tell: Callable[[str], None]
    not_run: list[str] = field(default_factory=list)
    """What was asked for and could not run, with the reason."""

    def check_length(self, longest: int) -> None:
        """Raises ConfigError for requests that are longer than the model's positions reach."""
        if longest > self.source.max_position:
            raise ConfigError(
                f"{self.source.name} has {self.source.max_position} positions, got requests of {longest} tokens; ask "
                "for shorter ones"
            )

    def leave_out(self, what: str, reason: object) -> None:
        """Says so now, and in the result."""
        self.not_run.append(f"not run: {what}: {reason}")
        self.tell(self.not_run[-1])


def load(setting: Setting, fusion: str) -> HFModel:
    """The model with random weights, its blocks fused as the engine does it."""
    model = load_model(setting.source, dtype=setting.dtype, device=setting.device, seed=setting.config.seed)
    if fusion == "inductor":
        fuse(model)
    return model


def shape_only(setting: Setting) -> HFModel:
    """The model without memory for its weights, for what only their sizes matter to."""
    with torch.device("meta"):
        return HFModel(build_model(setting.source.config, setting.dtype, experts="batched_mm"), setting.source.name)


def random_kv(setting: Setting, model: HFModel, num_blocks: int) -> KVCacheBuffers:
    """Filled, as products with zeros are faster than others."""
    kv = KVCacheBuffers.allocate(model.layers, num_blocks, BLOCK_SIZE, model.dtype, setting.device)
    for buffer in (*kv.key.values(), *kv.value.values()):
        buffer.normal_()
    return kv


MakeRunner = Callable[[Backend, Forward, AttentionBackend], Runner]


class StepGroup:
    """Runners by backend, each with a plan family of its own, on one model, one cache and one attention.

    Backends that cannot hold this attention are left out, and named.

    Owns: runners and families. Borrows: the model and the cache.
    """

    def __init__(
        self, setting: Setting, model: HFModel, kv: KVCacheBuffers, attention: str, phase: str, make: MakeRunner
    ) -> None:
        self.setting = setting
        self.model = model
        self.phase = phase
        self.runners: dict[str, Runner] = {}
        self.profiles: dict[str, GpuProfile] = {}
        """By backend, of the step that was compared last."""
        self.families: list[PlanFamily] = []
        in_graph = [phase] if any(backend_class(name).records_breaks for name in setting.config.backends) else []
        attending = make_attention(
            attention, setting.device, model.dtype, model.layers, block_size=BLOCK_SIZE, in_graph=in_graph
        )
        attending.bind(kv)
        self.attention = attending.for_phase(phase).name
        try:
            for backend in setting.config.backends:
                self._add(backend, attending, make)
        except BaseException:
            self.close()
            raise

    def _add(self, backend: str, attending: AttentionBackend, make: MakeRunner) -> None:
        family = PlanFamily(self.setting.device)
        self.families.append(family)
        runner = make(make_backend(backend, family), self._forward, attending)
        self.runners[backend] = runner
        try:
            runner.allocate()
        except ConfigError as error:
            self.runners.pop(backend).close()
            self.setting.leave_out(f"{backend} with attention {self.attention}", error)
            return
        runner.capture()

    def _forward(self, fields: Any) -> torch.Tensor:
        return self.model.forward(fields["input_ids"], fields["positions"], fields["logits_rows"])

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()
        for family in self.families:
            family.close()

    def compare(self, batch: StepBatch, work: Work, rounds: int) -> dict[str, dict[str, Metric]]:
        """Metrics of each backend on one step: equality of the logits, what was captured, and times on a GPU."""
        runs: dict[str, Callable[[], torch.Tensor]] = {
            name: (lambda runner=runner: runner.run(batch))  # type: ignore[misc]
            for name, runner in self.runners.items()
        }
        for family in self.families:
            family.poison()
        logits = {name: run().clone() for name, run in runs.items()}
        for name, values in logits.items():
            assert bool(values.isfinite().all()), f"{name}: logits are not finite, so equality would mean nothing"
        metrics = {name: self._equality(name, batch, logits) | self._captured(name, batch) for name in runs}
        reached = self._experts_reached(batch)
        for own in metrics.values():
            own.update(reached)
        if self.setting.ceilings is None:
            return metrics
        samples = interleaved(runs, rounds, self.setting.device, fewer=(EAGER,))
        for name, run in runs.items():
            profile = self.profiles[name] = gpu_profile(run, self.setting.device)
            floor = self.setting.ceilings.floor_ms(work)
            metrics[name] = _times(name, samples, profile.busy_ms, floor) | metrics[name]
            if name != EAGER:
                metrics[name]["back_to_back"] = Metric(value=back_to_back(run, self.setting.device), unit="ms")
                if self.phase == DECODE:
                    metrics[name]["one_ahead"] = Metric(value=one_ahead(run, self.setting.device), unit="ms")
        return metrics

    def _equality(self, name: str, batch: StepBatch, logits: dict[str, torch.Tensor]) -> dict[str, Metric]:
        """`equals_eager`: with the same padded step run as Python. `off_full`: largest difference over largest logit.

        Full graphs and breaks may have other kernels for attention, hence other rounding.
        """
        metrics: dict[str, Metric] = {"finite": Metric(value=True, unit="bool")}
        runner = self.runners[name]
        if runner.backend.captures:
            eager, again = runner.run_padded_eager(batch), runner.run_padded_eager(batch)
            if torch.equal(eager, again):
                metrics["equals_eager"] = Metric(value=torch.equal(logits[name], eager), unit="bool")
            else:  # kernels that add in any order: nothing to be equal to
                metrics["eager_repeats"] = Metric(value=False, unit="bool")
        if runner.backend.captures and name != FULL and FULL in logits:
            metrics["equals_full"] = Metric(value=torch.equal(logits[name], logits[FULL]), unit="bool")
            a, b = logits[name].float(), logits[FULL].float()
            metrics["off_full"] = Metric(value=((a - b).abs().max() / b.abs().max()).item(), unit="ratio")
        return metrics

    def _experts_reached(self, batch: StepBatch) -> dict[str, Metric]:
        """The share of all experts that the step's routing reaches, mean over layers. What a step reads depends on it,
        and random weights do not promise it."""
        shares: list[float] = []

        def note(chosen: torch.Tensor, num_experts: int) -> None:
            shares.append(len(chosen.unique()) / num_experts)

        with watch_routing(note):
            for runner in list(self.runners.values())[:1]:
                runner.run_eager(batch)
        return {"experts_reached": Metric(value=statistics.mean(shares), unit="ratio")} if shares else {}

    def _captured(self, backend: str, batch: StepBatch) -> dict[str, Metric]:
        runner = self.runners[backend]
        bucket = runner.spec.bucket_for(batch.num_tokens, batch.num_reqs)
        report = None if bucket is None else runner.explain().get(runner.spec.key(bucket))
        if report is None:
            return {}
        nodes = sum(step.num_nodes for step in report.steps)
        counts = {"segments": report.num_segments, "breaks": report.num_breaks, "nodes": nodes}
        return {name: Metric(value=count, unit="count") for name, count in counts.items()}


def _times(name: str, samples: dict[str, Samples], busy: float, floor: float) -> dict[str, Metric]:
    own = samples[name]
    metrics = own.metrics() | {"gpu_busy": Metric(value=busy, unit="ms"), "roofline": Metric(value=floor, unit="ms")}
    ratios = {"over_gpu_busy": own.median / busy, "over_roofline": own.median / floor}
    if name not in (FULL, EAGER) and FULL in samples:
        ratios["over_full"] = own.median / samples[FULL].median
        ratios["over_full_paired"] = paired_ratio(own, samples[FULL])
    return metrics | {key: Metric(value=value, unit="ratio") for key, value in ratios.items()}


@contextmanager
def step_group(
    setting: Setting, model: HFModel, kv: KVCacheBuffers, attention: str, phase: str, make: MakeRunner
) -> Iterator[StepGroup]:
    """A group that is closed in the end, and its memory given back."""
    group = StepGroup(setting, model, kv, attention, phase, make)
    try:
        yield group
    finally:
        group.close()
        give_memory_back()


def give_memory_back() -> None:
    """To whoever runs next, another process included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def case_rows(
    group: StepGroup,
    name: str,
    shape: Mapping[str, Scalar],
    fusion: str,
    batch: StepBatch,
    metrics: dict[str, dict[str, Metric]],
) -> list[Row]:
    """One row a backend; tells each. Then, of the first that captures, where the GPU's time goes.

    `attended_by` names the implementation of this step where `attention` chooses among several.
    """
    rows: list[Row] = []
    kernels: list[Row] = []
    for backend, values in metrics.items():
        params = {**shape, "backend": backend, "fusion": fusion, "attention": group.attention}
        params["attended_by"] = group.runners[backend].attention_name(batch)
        rows.append(Row(name=name, params=params, metrics=values))
        group.setting.tell(describe(rows[-1]))
        if not kernels and group.runners[backend].backend.captures and backend in group.profiles:
            kernels = kernel_rows(params, group.profiles[backend].kernels)
    return rows + kernels


def kernel_rows(params: Mapping[str, Scalar], kernels: Sequence[KernelTime]) -> list[Row]:
    """Rows `kernel`: the longest by name, and all others as one."""
    shown, others = list(kernels[:_NUM_KERNELS]), kernels[_NUM_KERNELS:]
    if others:
        shown.append(KernelTime("others", sum(kernel.ms for kernel in others), sum(kernel.calls for kernel in others)))
    total = sum(kernel.ms for kernel in kernels)
    return [
        Row(
            name="kernel",
            params={**params, "kernel": kernel.name[:_NAME_LENGTH]},
            metrics={
                "time": Metric(value=kernel.ms, unit="ms"),
                "share": Metric(value=100 * kernel.ms / total, unit="percent"),
                "calls": Metric(value=round(kernel.calls), unit="count"),
            },
        )
        for kernel in shown
    ]


def describe(row: Row) -> str:
    """One line, while a benchmark runs."""
    shown = (
        "build", "compile", "capture", "time", "p10", "p90", "back_to_back", "one_ahead", "host", "gpu_busy",
        "roofline", "segments", "breaks", "experts_reached", "equals_eager", "equals_full",
    )  # fmt: skip
    values = [f"{key} {_short(row.metrics[key])}" for key in shown if key in row.metrics]
    return "  ".join([row.name, *(f"{key}={value}" for key, value in row.params.items()), *values])


def _short(metric: Metric) -> str:
    if isinstance(metric.value, bool):
        return "yes" if metric.value else "NO"
    return f"{metric.value:.4g}" + ("" if metric.unit in ("count", "ratio") else f" {metric.unit}")


def case_seed(config: BenchConfig, shape: Sequence[int]) -> int:
    """Of a case's token ids."""
    return zlib.crc32(repr((config.seed, *shape)).encode())
