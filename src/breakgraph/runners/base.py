"""The runner: one phase, from host batch to logits."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from breakgraph.attention import AttentionBackend, AttentionMetadata, AttentionStep, use_step
from breakgraph.backends import make_backend
from breakgraph.errors import ClosedError, ConfigError
from breakgraph.graph import PlanFamily
from breakgraph.runners.admission import admit
from breakgraph.runners.batch import StepBatch
from breakgraph.runners.buffers import StaticBuffers, live_fields
from breakgraph.runners.spec import PhaseSpec
from breakgraph.runners.stats import RunnerStats

if TYPE_CHECKING:
    from breakgraph.backends import Backend
    from breakgraph.graph import PlanReport, ShapeKey

logger = logging.getLogger(__name__)

Forward = Callable[[Mapping[str, Tensor]], Tensor]
"""From the spec's fields, by name, to logits [requests axis, vocab]."""
Progress = Callable[[str, int, int], None]
"""Called after each capture: key, captures done, captures in all."""


class Runner(ABC):
    """Runs the steps of one phase, by replay where it can and eagerly where it must.

    Life cycle: ``allocate``, ``warm_up``, ``capture``, then ``run`` for every step, ``close``. ``run`` never captures;
    before ``capture`` it runs eagerly. One thread, one stream.

    Owns: the backend, the static buffers. Borrows: the forward, the attention, the backend's plan family.
    """

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

        First-use state appears, and peak memory can be read. Writes KV to the reserved slot only.
        """
        self._check_open()
        self._run_eager(self.spec.dummy_batch(self.spec.max_size))

    def measure_pool_bytes(self) -> int:
        """Bytes that the largest bucket takes in a pool of its own: captured into one, read, and dropped.

        0 when this runner captures nothing. Writes KV to the reserved slot only.
        """
        buffers = self._allocated()
        if not self.backend.captures:
            return 0
        with PlanFamily(self.device) as family:
            backend = make_backend(self.backend.name, family)
            self._capture_bucket(buffers, backend, self.spec.ladder[-1])
            measured = family.pool_bytes
            backend.close()
        return measured

    def capture(self, progress: Progress | None = None) -> None:
        """Capture the buckets that are not captured yet, largest first: smaller ones fit in blocks the pool has then.

        Writes KV to the reserved slot only. All or nothing: on any exception what this call captured is closed, and the
        exception arrives unchanged.
        """
        buffers = self._allocated()
        if not self.backend.captures:
            return
        sizes = [size for size in reversed(self.spec.ladder) if not self.backend.captured(self.spec.key(size))]
        started = time.perf_counter()
        try:
            with self.backend.family.window():
                for done, size in enumerate(sizes, start=1):
                    self._capture_bucket(buffers, self.backend, size)
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
        reason = admit(self.spec, self.backend, batch.num_tokens, batch.num_reqs)
        if reason is not None:
            logits = self._run_eager(batch)
            self.stats.eager_steps[reason] += 1
            return logits
        return self._replay(batch, self._bucket(batch))

    def run_padded_eager(self, batch: StepBatch) -> Tensor:
        """Logits [num_reqs, vocab] of one step from a replay's buffers and metadata, with the forward called as Python.

        What a replay is compared with. A clone; not counted in the stats.

        Raises:
            ConfigError: the batch does not fit the phase, the KV cache or any bucket.
        """
        buffers = self._allocated()
        self.spec.check(batch)
        fields = buffers.load(batch, self._bucket(batch))
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=True)):
            return self.forward(fields)[: batch.num_reqs].clone()

    def explain(self) -> dict[ShapeKey, PlanReport]:
        """What was captured, by key."""
        return self.backend.explain()

    def close(self) -> None:
        """Close the plans, then drop the buffers that they read."""
        self._closed = True
        self.backend.close()
        self._buffers = None

    def _capture_bucket(self, buffers: StaticBuffers, backend: Backend, size: int) -> None:
        batch = self.spec.dummy_batch(size)
        fields = buffers.load(batch, size)
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=True)):
            backend.capture(self.spec.key(size), lambda: self.forward(fields))

    def _discard(self, key: ShapeKey) -> None:
        try:
            self.backend.release(key)
        except Exception:
            # The capture's own exception is the one to report.
            logger.exception("could not close %s after a failed capture", key)

    def _replay(self, batch: StepBatch, size: int) -> Tensor:
        fields = self._allocated().load(batch, size)
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=True)):
            logits: Tensor = self.backend.replay(self.spec.key(size))
        self.stats.replays[size] += 1
        self.stats.num_padded_tokens += self.spec.num_rows("tokens", size) - batch.num_tokens
        return logits[: batch.num_reqs]

    def _run_eager(self, batch: StepBatch) -> Tensor:
        fields = live_fields(self.spec, batch, self.device)
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=False)):
            return self.forward(fields)

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
