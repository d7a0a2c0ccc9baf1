"""The runner: one phase, from host batch to logits."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from breakgraph.attention import AttentionBackend, AttentionMetadata, AttentionStep, use_step
from breakgraph.errors import ClosedError, ConfigError
from breakgraph.graph import Peak, get_device
from breakgraph.runners.admission import admit
from breakgraph.runners.batch import StepBatch
from breakgraph.runners.buffers import StaticBuffers, live_fields
from breakgraph.runners.memory import PhaseMemory, traces_of
from breakgraph.runners.spec import PhaseSpec
from breakgraph.runners.stats import RunnerStats

if TYPE_CHECKING:
    from breakgraph.backends import Backend
    from breakgraph.graph import Device, PlanReport, ShapeKey

logger = logging.getLogger(__name__)

Forward = Callable[[Mapping[str, Tensor]], Tensor]
"""From the spec's fields, by name, to logits [requests axis, vocab]."""
_MEASURED_CAPTURES = 3
"""Enough that the driver, which hands out 2 MiB and more at a time, shows what a plan takes."""

Progress = Callable[[str, int, int], None]
"""Called after each capture: key, captures done, captures in all."""


class Runner(ABC):
    """Runs the steps of one phase, by replay where it can and eagerly where it must.

    Life cycle: ``allocate``, ``warm_up``, ``capture``, then ``run`` for every step, ``close``. ``run`` never captures;
    before ``capture`` it runs eagerly. One thread, one stream.

    Owns: the backend, the static buffers. Borrows: the forward, the attention, the backend's plan family.
    """

    has_live_metadata: ClassVar[bool] = False
    """Whether breaks read metadata of the step's own requests, and not what lies in the rows of the bucket."""

    def __init__(
        self,
        spec: PhaseSpec,
        backend: Backend,
        forward: Forward,
        attention: AttentionBackend,
        device: torch.device | str,
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.forward = forward
        self.attention = attention
        self.device = torch.device(device)
        self.stats = RunnerStats()
        self._buffers: StaticBuffers | None = None
        self._closed = False

    @abstractmethod
    def _attention_step(self, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool) -> AttentionStep:
        """This step's attention metadata.

        Args:
            fields: By name, on the device.
            in_bucket: Whether they are the static buffers, padded to a bucket; otherwise fresh and unpadded.
        """

    def allocate(self) -> None:
        """Create the static buffers, once: plans hold their addresses.

        Raises:
            ConfigError: the backend puts attention inside the graph, and this attention cannot be there.
        """
        self._check_open()
        if self.backend.records_breaks:
            self._check_attention_in_graph()
        if self._buffers is None:
            self._buffers = StaticBuffers(self.spec, self.device)
        # A step writes the plans' memory and the KV slots of its own tokens: a void one leaves nothing wrong behind.
        self.backend.family.checks_late = True

    def _check_attention_in_graph(self) -> None:
        if not self.spec.attention_support:
            raise ConfigError(
                f"{self.spec.phase} with backend {self.backend.name!r} puts attention inside the graph, and the "
                "metadata of this runner has no fixed place; give the spec request_slots, or use backend 'breakable'"
            )
        support = self.attention.graph_support(self.spec.phase)
        if support not in self.spec.attention_support:
            raise ConfigError(
                f"{self.spec.phase} with backend {self.backend.name!r} needs an attention with graph support "
                f"{' or '.join(sorted(self.spec.attention_support))}, attention {self.attention.name!r} has "
                f"{support!r} there; use backend 'breakable' or another attention"
            )

    def warm_up(self) -> None:
        """Run the largest step the scheduler can send, once and eagerly.

        First-use state appears. Writes KV to the reserved slot only.
        """
        self._check_open()
        self._run_eager(self.spec.dummy_batch(self.spec.max_size))

    @property
    def input_bytes(self) -> int:
        """Size of the static buffers."""
        return self._allocated().num_bytes

    def measure_memory(self, num_long_reqs: int) -> PhaseMemory:
        """Run, capture and replay the largest steps, to learn what they need. Close this runner and its family then.

        Writes KV to the reserved slot and reads the reserved block only, so that it can precede the KV cache. Nothing
        else may be captured into the family.

        Args:
            num_long_reqs: Requests of the greatest length that a step may have: what attention gathers of them counts.
        """
        spec, captures = self.spec, self.backend.captures
        device, top = get_device(self.device), max(spec.max_size, spec.ladder[-1] if captures else 1)

        def run_largest() -> None:
            self._run_eager(spec.dummy_batch(top))
            self._run_eager(spec.longest_batch(top, num_long_reqs))

        self.warm_up()  # before anything is measured: what libraries keep from their first use is not a step's
        eager = Peak() if device.emulated else device.peak_of(run_largest)
        measured = PhaseMemory(
            phase=spec.phase,
            num_plans=len(spec.ladder) if captures else 0,
            runs_eagerly=not (captures and spec.holds_every_step),
            input_bytes=self.input_bytes,
            eager=eager,
        )
        return self._measure_graphs(device, measured, num_long_reqs) if captures else measured

    def capture_largest(self) -> None:
        """Capture the largest bucket alone, if this runner captures. Writes KV to the reserved slot only."""
        self._allocated()
        if self.backend.captures:
            self._capture_bucket(self.spec.ladder[-1])

    def _measure_graphs(self, device: Device, measured: PhaseMemory, num_long_reqs: int) -> PhaseMemory:
        family, largest, smallest = self.backend.family, self.spec.ladder[-1], self.spec.ladder[0]
        with family.tracing() as events:
            self._capture_bucket(largest)
        measured = replace(
            measured,
            pool_bytes=family.pool_bytes,
            pool_peak_bytes=self.backend.explain()[self.spec.key(largest)].pool_peak_bytes,
            output_bytes=family.output_bytes,
            traces=traces_of(events, self.spec.ladder),
        )
        if device.emulated:
            return measured

        def replay_largest() -> None:
            self._replay(self.spec.dummy_batch(largest), largest)
            self._replay(self.spec.longest_batch(largest, num_long_reqs), largest)

        replay = device.peak_of(replay_largest)
        taken: list[int] = []
        for _ in range(1 + _MEASURED_CAPTURES):
            self.backend.release(self.spec.key(smallest))  # its graphs stay until the family closes
            self._capture_bucket(smallest)
            taken.append(self.backend.explain()[self.spec.key(smallest)].driver_bytes or 0)
        # The first one may have loaded code for its shapes.
        per_plan = max(0, -(-sum(taken[1:]) // _MEASURED_CAPTURES))
        return replace(measured, replay=replay, driver_bytes_per_plan=per_plan)

    def choose(self) -> None:
        """Decide how each bucket will be captured, where the backend leaves that to the runner. Keeps no memory."""
        self._check_open()

    def capture(self, progress: Progress | None = None) -> None:
        """Capture the buckets that are not captured yet, largest first: smaller ones fit in blocks the pool has then.

        Writes KV to the reserved slot only. All or nothing: on any exception what this call captured is closed, and the
        exception arrives unchanged.
        """
        self._allocated()
        if not self.backend.captures:
            return
        sizes = [size for size in reversed(self.spec.ladder) if not self.backend.captured(self.spec.key(size))]
        started = time.perf_counter()
        try:
            with self.backend.family.window():
                for done, size in enumerate(sizes, start=1):
                    self._capture_bucket(size)
                    if progress is not None:
                        progress(str(self.spec.key(size)), done, len(sizes))
        except BaseException:
            for size in sizes:
                self._discard(self.spec.key(size))
            raise
        self.stats.capture_sec += time.perf_counter() - started

    def run(self, batch: StepBatch) -> Tensor:
        """Logits [num_reqs, vocab] of one step.

        A replay returns a view of plan-owned storage: the next replay of any runner on the same plan family overwrites
        it; clone to keep. An eager step returns a fresh tensor.

        Raises:
            ConfigError: the batch does not fit the phase or the KV cache; no forward ran.
            ReplayError: the replay is void, the runner stays usable.
        """
        self._check_open()
        self.spec.check(batch)
        size = self.spec.bucket_for(batch.num_tokens, batch.num_reqs) if self.backend.captures else None
        if size is None or not self.backend.captured(self.spec.key(size)):
            reason = admit(self.spec, self.backend, batch.num_tokens, batch.num_reqs)
            assert reason is not None
            logits = self._run_eager(batch)
            self.stats.eager_steps[reason] += 1
            return logits
        logits = self._replay(batch, size)
        self.stats.replays[size] += 1
        self.stats.num_padded_tokens += self.spec.num_rows("tokens", size) - batch.num_tokens
        return logits

    def run_padded_eager(self, batch: StepBatch) -> Tensor:
        """Logits [num_reqs, vocab] of one step from a replay's buffers and metadata, with the forward called as Python.

        What a replay is compared with. A clone; not counted in the stats.

        Raises:
            ConfigError: the batch does not fit the phase, the KV cache or any bucket.
        """
        self.spec.check(batch)
        with self.in_bucket(batch) as forward:
            return forward()[: batch.num_reqs].clone()

    @contextmanager
    def in_bucket(self, batch: StepBatch) -> Iterator[Callable[[], Tensor]]:
        """A step made ready as for a replay, for whoever calls the forward himself: buffers loaded, metadata in place.

        The step is not checked: the spec's own, which write to the reserved slot, would not pass.

        Yields:
            The forward, or what the backend compiled from it, as the bucket's plan was captured from; its logits have a
            row for each padded request.

        Raises:
            ConfigError: the batch fits no bucket.
        """
        fields = self._load(batch, self._bucket(batch))
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=True)):
            yield self.backend.reference(self.spec.key(self._bucket(batch)), lambda: self.forward(fields))

    def run_replay(self, batch: StepBatch) -> Tensor:
        """Logits [num_reqs, vocab] of one step by replay, whatever admission says. A clone; not counted in the stats.

        Raises:
            ConfigError: the batch does not fit the phase, the KV cache or any bucket.
            ReplayError: the replay is void, or the bucket is not captured.
        """
        self._allocated()
        self.spec.check(batch)
        return self._replay(batch, self._bucket(batch)).clone()

    def attention_name(self, batch: StepBatch) -> str:
        """Which attention a replay of the step has, or its eager run where it fits no bucket."""
        size = self.spec.bucket_for(batch.num_tokens, batch.num_reqs) if self.backend.captures else None
        load = partial(live_fields, self.spec, batch, self.device)
        fields = load() if size is None else self._load(batch, size)
        return self.attention.for_step(self._attention_step(batch, fields, in_bucket=size is not None)).name

    def run_eager(self, batch: StepBatch) -> Tensor:
        """Logits [num_reqs, vocab] of one step without padding. Not counted in the stats.

        Raises:
            ConfigError: the batch does not fit the phase or the KV cache.
        """
        self._check_open()
        self.spec.check(batch)
        return self._run_eager(batch)

    def poison_inputs(self, size: int) -> None:
        """Fill a bucket's inputs with values that are harmless as indices, and wrong: the next step rewrites them."""
        self._allocated().poison(size)

    def explain(self) -> dict[ShapeKey, PlanReport]:
        """What was captured, by key."""
        return self.backend.explain()

    def close(self) -> None:
        """Close the plans, then drop the buffers that they read."""
        self._closed = True
        self.backend.close()
        self._buffers = None

    def _capture_bucket(self, size: int) -> None:
        batch = self.spec.dummy_batch(size)
        fields = self._load(batch, size)
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=True)):
            self.backend.capture(self.spec.key(size), lambda: self.forward(fields))

    def _discard(self, key: ShapeKey) -> None:
        try:
            self.backend.release(key)
        except Exception:
            # The capture's own exception is the one to report.
            logger.exception("could not close %s after a failed capture", key)

    def _replay(self, batch: StepBatch, size: int) -> Tensor:
        with torch.no_grad(), self._ready_for_replay(batch, size):
            logits: Tensor = self.backend.replay(self.spec.key(size))
        return logits[: batch.num_reqs]

    def _ready_for_replay(self, batch: StepBatch, size: int) -> AbstractContextManager[None]:
        """Inputs are in place; metadata is while the context lasts. With breaks the GPU works on the first segment
        while attention is planned, which that segment needs no plan for."""
        step = self._attention_step(batch, self._load(batch, size), in_bucket=True)
        plan = partial(self.attention.plan, step)
        return use_step(plan if self.backend.has_breaks(self.spec.key(size)) else plan())

    def _run_eager(self, batch: StepBatch) -> Tensor:
        fields = live_fields(self.spec, batch, self.device)
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=False)):
            return self.forward(fields)

    def _load(self, batch: StepBatch, size: int) -> Mapping[str, Tensor]:
        """Write a step into the static buffers of a bucket, which it gives by field name."""
        for_breaks = self.has_live_metadata and self.backend.has_breaks(self.spec.key(size))
        return self._allocated().load(batch, size, for_breaks)

    def _plan_attention(self, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool) -> AttentionMetadata:
        return self.attention.plan(self._attention_step(batch, fields, in_bucket))

    def _bucket(self, batch: StepBatch) -> int:
        bucket = self.spec.bucket_for(batch.num_tokens, batch.num_reqs)
        if bucket is None:
            raise ConfigError(
                f"{self.spec.phase}: expected a step that fits bucket {self.spec.ladder[-1]}, got {batch.num_tokens} "
                f"tokens in {batch.num_reqs} requests; widen the ladder, or use run()"
            )
        return bucket

    def _allocated(self) -> StaticBuffers:
        self._check_open()
        if self._buffers is None:
            raise ConfigError(f"{self.spec.phase} runner: no buffers yet; call allocate() first")
        return self._buffers

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self.spec.phase} runner was closed")
