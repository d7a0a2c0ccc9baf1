"""Every way to run a prefill step, side by side: what building its buckets takes and keeps, what a replay costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from breakgraph import backends
from breakgraph.attention import make_attention
from breakgraph.bench.arms import Setting, case_seed, describe, give_memory_back, load, random_kv
from breakgraph.bench.config import CaptureBench
from breakgraph.bench.result import Metric, Row, Scalar
from breakgraph.bench.timing import Samples, interleaved, synchronize
from breakgraph.bench.workloads import BLOCK_SIZE, num_blocks, prefill_batch, prefill_rounds
from breakgraph.errors import CaptureError, ConfigError
from breakgraph.graph import PlanFamily
from breakgraph.runners import Runner, StepBatch, prefill_runner_class, prefill_spec

if TYPE_CHECKING:
    from breakgraph.attention import AttentionBackend
    from breakgraph.models import HFModel

TOP = 2048
"""Tokens of the largest bucket unless asked for others, as the engine has them on a GPU."""
SHOWN = (128, 512, 2048)
"""Buckets whose replays are timed, besides the largest."""
ROUNDS = 30
_SLOTS = 16
"""Requests that a full graph has room for, unless asked for others."""

_BREAKS = ("graph/eager_break.py", "graph/boundary.py")
_TRACED = ("backends/tc_piecewise.py", "backends/tc_piecewise_graph.py", "graph/tracing.py")


@dataclass(frozen=True)
class Arm:
    """One way to run the step. `sources` are the files that it needs beyond what all graphs share."""

    backend: str
    fusion: str
    sources: tuple[str, ...]


ARMS = (
    Arm("eager", "none", ("backends/eager.py",)),
    Arm("tc_piecewise", "none", (*_TRACED, *_BREAKS)),
    Arm("tc_piecewise_inductor", "none", (*_TRACED, *_BREAKS, "graph/compiled.py")),
    Arm("breakable", "none", ("backends/breakable.py", *_BREAKS)),
    Arm(
        "breakable",
        "inductor",
        ("backends/breakable.py", *_BREAKS, "graph/compiled.py", "models/fusion.py", "models/merging.py"),
    ),
    Arm("full", "none", ("backends/full.py",)),
)


@dataclass
class _Built:
    """An arm with its buckets captured. Owns its runner and family; closed by the group of its model."""

    arm: Arm
    runner: Runner
    family: PlanFamily
    attention: str
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, Scalar]:
        return {"backend": self.arm.backend, "fusion": self.arm.fusion, "attention": self.attention}


def measure_comparison(setting: Setting) -> Iterator[Row]:
    """Rows `build`, one an arm, and `replay`, one an arm and bucket. Each arm compiles from an empty cache."""
    config = setting.config
    assert isinstance(config, CaptureBench)
    top = config.prefill_buckets[-1] if config.prefill_buckets else config.max_num_batched_tokens or TOP
    setting.check_length(top)
    for attention in config.attention:
        expected: dict[int, torch.Tensor] = {}
        for fusion in dict.fromkeys(arm.fusion for arm in ARMS):
            arms = [arm for arm in ARMS if arm.fusion == fusion]
            yield from _of_one_model(setting, config, top, attention, arms, expected)
            give_memory_back()


def _of_one_model(
    setting: Setting,
    config: CaptureBench,
    top: int,
    attention: str,
    arms: Sequence[Arm],
    expected: dict[int, torch.Tensor],
) -> Iterator[Row]:
    """Of arms that share a model; their replays take turns. `expected` are eager's logits, by tokens."""
    with ExitStack() as owned:
        model = load(setting, arms[0].fusion)
        kv = random_kv(setting, model, num_blocks([top]) + _SLOTS)
        attending = make_attention(
            attention, setting.device, model.dtype, model.layers, block_size=BLOCK_SIZE, in_graph=["prefill"]
        )
        attending.bind(kv)
        built = []
        for arm in arms:
            made = _build(setting, config, top, model, attending, arm, owned)
            if made is not None:
                built.append(made)
                yield _build_row(setting, made)
        for size in _shown(built[0].runner.spec.ladder) if built else ():
            batch = prefill_batch(size, 1, model.vocab_size, case_seed(config, (size,)))
            yield from _replay_rows(setting, built, batch, expected)


def _shown(ladder: Sequence[int]) -> list[int]:
    return [size for size in ladder if size in SHOWN or size == ladder[-1]]


def _build(
    setting: Setting,
    config: CaptureBench,
    top: int,
    model: HFModel,
    attention: AttentionBackend,
    arm: Arm,
    owned: ExitStack,
) -> _Built | None:
    family = owned.enter_context(PlanFamily(setting.device))
    backend = backends.make_backend(arm.backend, family)
    common: dict[str, Any] = {
        "max_num_batched_tokens": top,
        "max_num_seqs": config.max_num_seqs or _SLOTS,
        "max_model_len": top,
        "num_blocks": num_blocks([top]) + _SLOTS,
        "block_size": BLOCK_SIZE,
        "buckets": config.prefill_buckets,
    }
    slots = (config.max_num_seqs or _SLOTS) if backend.records_breaks else None

    def forward(fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return model.forward(fields["input_ids"], fields["positions"], fields["logits_rows"])

    runner = prefill_runner_class(backend)(
        prefill_spec(**common, request_slots=slots), backend, forward, attention, setting.device
    )  # fmt: skip
    owned.callback(runner.close)
    made = _Built(arm, runner, family, attention.for_phase("prefill").name)
    setting.tell(f"building {arm.backend}, fusion {arm.fusion}")
    compiles = backend.compiles or arm.fusion != "none"
    try:
        with _nothing_compiled() if compiles else nullcontext():
            _capture(setting, made)
    except (ConfigError, CaptureError) as error:
        setting.leave_out(f"{arm.backend}, fusion {arm.fusion}, attention {made.attention}", error)
        return None
    return made


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """As in a new process with an empty disk cache."""
    import torch._dynamo
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        yield


def _capture(setting: Setting, made: _Built) -> None:
    """Compiling is what backends report as such, and with fusion what the first eager step takes beyond the second."""
    runner = made.runner
    runner.allocate()
    first = _seconds(setting, runner.warm_up)
    again = _seconds(setting, runner.warm_up)
    fusing = max(0.0, first - again) if made.arm.fusion != "none" else 0.0
    building = _seconds(setting, runner.capture)
    compiling = sum(report.compile_sec for report in runner.explain().values())
    made.seconds = {"build": fusing + building, "compile": fusing + compiling, "capture": building - compiling}


def _seconds(setting: Setting, run: Callable[[], object]) -> float:
    synchronize(setting.device)
    started = time.perf_counter()
    run()
    synchronize(setting.device)
    return time.perf_counter() - started


def _build_row(setting: Setting, made: _Built) -> Row:
    reports = made.runner.explain().values()
    metrics: dict[str, Metric] = {}
    if setting.ceilings is not None and made.runner.backend.captures:
        metrics |= {name: Metric(value=seconds, unit="s") for name, seconds in made.seconds.items()}
    metrics["buckets"] = Metric(value=len(reports), unit="count")
    sizes = {
        "pool": made.family.pool_bytes,
        "boundaries": max((report.boundary_bytes for report in reports), default=0),
        "outputs": made.family.output_bytes,
    }
    if all(report.driver_bytes is not None for report in reports):
        sizes["driver"] = sum(report.driver_bytes or 0 for report in reports)
    metrics |= {name: Metric(value=size, unit="bytes") for name, size in sizes.items()}
    metrics["own_lines"] = Metric(value=lines_of(made.arm), unit="count")
    row = Row(name="build", params=made.params, metrics=metrics)
    setting.tell(describe(row))
    return row


def lines_of(arm: Arm) -> int:
    """Lines of its sources that are not blank."""
    folder = Path(backends.__file__).parents[1]
    texts = [(folder / name).read_text(encoding="utf-8") for name in arm.sources]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def _replay_rows(
    setting: Setting, built: Sequence[_Built], batch: StepBatch, expected: dict[int, torch.Tensor]
) -> list[Row]:
    names = {f"{made.arm.backend}, {made.arm.fusion}": made for made in built}
    runs: dict[str, Callable[[], torch.Tensor]] = {
        name: (lambda runner=made.runner: runner.run(batch))  # type: ignore[misc]
        for name, made in names.items()
    }
    for made in built:
        made.family.poison()
    logits = {name: run().clone() for name, run in runs.items()}
    samples: dict[str, Samples] = {}
    if setting.ceilings is not None:
        rounds = prefill_rounds(batch.num_tokens, ROUNDS)
        samples = interleaved(runs, rounds, setting.device, fewer=[n for n in names if n.startswith("eager")])
    rows = []
    for name, made in names.items():
        if made.arm.backend == "eager":
            expected[batch.num_tokens] = logits[name]
        metrics = samples[name].metrics() if name in samples else {}
        metrics |= _launches(made, batch) | _equality(made, batch, logits[name], expected[batch.num_tokens])
        rows.append(Row(name="replay", params={**made.params, "tokens": batch.num_tokens}, metrics=metrics))
        setting.tell(describe(rows[-1]))
    return rows


def _launches(made: _Built, batch: StepBatch) -> dict[str, Metric]:
    """Graphs that a replay launches, breaks that it runs, and nodes of its graphs."""
    key = made.runner.spec.key(batch.num_tokens)
    report = made.runner.explain().get(key)
    if report is None:
        return {}
    graphs = sum(step.kind == "segment" and step.num_nodes > 0 for step in report.steps)
    nodes = sum(step.num_nodes for step in report.steps)
    counts = {"graphs": graphs, "breaks": report.num_breaks, "nodes": nodes}
    return {name: Metric(value=count, unit="count") for name, count in counts.items()}


def _equality(made: _Built, batch: StepBatch, logits: torch.Tensor, expected: torch.Tensor) -> dict[str, Metric]:
    """`equals_eager`: with what the plan was captured from, called as Python. `off_eager`: the largest difference from
    plain eager over its largest logit."""
    assert bool(logits.isfinite().all()), f"{made.arm.backend}: logits are not finite, so equality would mean nothing"
    one, other = logits.float(), expected.float()
    metrics = {"off_eager": Metric(value=((one - other).abs().max() / other.abs().max()).item(), unit="ratio")}
    if not made.runner.backend.captures:
        return metrics
    eager, again = made.runner.run_padded_eager(batch), made.runner.run_padded_eager(batch)
    if torch.equal(eager, again):
        return metrics | {"equals_eager": Metric(value=torch.equal(logits, eager), unit="bool")}
    return metrics | {"eager_repeats": Metric(value=False, unit="bool")}
