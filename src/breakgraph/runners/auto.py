"""Runners that time buckets as full graphs and as breakable ones, and capture each as the faster.

A full graph costs the host one launch, a breakable one a launch and some Python for each break. That shows while steps
are short. Long steps gain nothing from it, and attention in a break knows the live requests, where a full graph has
slots for the most there may be. So there is a size up to which full graphs win, and it is searched for by bisection.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from breakgraph.attention import AttentionStep, use_step
from breakgraph.errors import CaptureError, ConfigError
from breakgraph.graph import PlanFamily, get_device
from breakgraph.runners.base import Progress, Runner
from breakgraph.runners.batch import StepBatch
from breakgraph.runners.decode import DecodeRunner
from breakgraph.runners.prefill import PrefillRunner, SlottedPrefillRunner, slotted_step

if TYPE_CHECKING:
    from breakgraph.backends import Backend
    from breakgraph.backends.auto import AutoBackend
    from breakgraph.graph import Plan

FULL, BREAKABLE = "full", "breakable"
_GAIN = 0.99
"""What a full graph takes at most of the time with breaks: a difference below is noise, and breaks ask for less."""
_WARM_ROUNDS, _ROUNDS = 2, 9
_LONG_ROUNDS, _LONG_SEC = 3, 0.5
"""So few rounds are enough once they have taken so long: launches hardly count in long steps."""


class ChoosingRunner(Runner):
    """Chooses before it captures. What memory its plans need is measured with breaks: a full graph is taken only where
    it needs no more of the pool."""

    backend: AutoBackend

    def choose(self) -> None:
        """Chooses for every bucket that nothing was chosen for; about log2 of their number are timed.

        Raises:
            ConfigError: the plan family has a group, whose ranks might choose differently.
        """
        self._allocated()
        sizes = [size for size in reversed(self.spec.ladder) if not self.backend.has_choice(self.spec.key(size))]
        if sizes and self.backend.family.ranks is not None:
            raise ConfigError(
                "backend 'auto' times buckets on each rank by itself, and ranks might choose differently; give the "
                "backend to capture with"
            )
        started, refusal = time.perf_counter(), self._full_refusal()
        if refusal is not None:
            for size in sizes:
                self._choose(size, BREAKABLE, refusal)
        elif sizes:
            with self.backend.family.window():
                self._search(sizes)
        self.stats.capture_sec += time.perf_counter() - started

    def _search(self, sizes: Sequence[int]) -> None:
        """`sizes`: the largest first, which is timed in any case: what it needs with breaks is the limit for all."""
        limit = self._choose_faster(sizes[0], None)
        # All before `first` have breaks, all from `end` on are full graphs; the others are not known yet.
        first, end = (1, len(sizes)) if self._has_breaks(sizes[0]) else (0, 0)
        while first < end:
            middle = (first + end) // 2
            self._choose_faster(sizes[middle], limit)
            if self._has_breaks(sizes[middle]):
                first = middle + 1
            else:
                end = middle
        for index, size in enumerate(sizes):
            if not self.backend.has_choice(self.spec.key(size)):
                is_full = index >= end
                nearest = sizes[end] if is_full else sizes[end - 1]
                self._choose(size, FULL if is_full else BREAKABLE, f"as bucket {nearest}, which was timed")

    def _has_breaks(self, size: int) -> bool:
        return self.backend.has_breaks(self.spec.key(size))

    def capture(self, progress: Progress | None = None) -> None:
        self.choose()
        super().capture(progress)

    def _full_refusal(self) -> str | None:
        """Why no bucket can be timed as a full graph, or None."""
        if not can_time(self.device):
            return "nothing is timed on the emulated device"
        try:
            self._check_attention_in_graph()
        except ConfigError as error:
            return str(error)
        return None

    def _choose(
        self, size: int, backend: str, reason: str = "", step_sec: Mapping[str, float] | None = None
    ) -> None:  # fmt: skip
        self.backend.choose(self.spec.key(size), backend, reason, step_sec)

    def _choose_faster(self, size: int, limit: int | None) -> int:
        """Captures and times a bucket both ways, in a family that is gone afterwards.

        Args:
            limit: Bytes of the pool that a plan may need; None: what this bucket needs with breaks.

        Returns:
            The limit.
        """
        try:
            with PlanFamily(self.device) as family:
                plans = {BREAKABLE: self._captured_as(BREAKABLE, size, family)}
                limit = limit or plans[BREAKABLE].explain().pool_peak_bytes
                try:
                    plans[FULL] = self._captured_as(FULL, size, family)
                except (CaptureError, torch.OutOfMemoryError) as error:
                    self._choose(size, BREAKABLE, f"no full graph: {str(error).splitlines()[0]}")
                    return limit
                needed = plans[FULL].explain().pool_peak_bytes
                steps = {name: partial(self._replay_as, name, size, plans[name]) for name in (FULL, BREAKABLE)}
                seconds = time_steps(steps, self.device)
        except BaseException:
            self.backend.forget(self.spec.key(size))
            raise
        is_faster = seconds[FULL] <= _GAIN * seconds[BREAKABLE]
        if not is_faster or needed <= limit:
            self._choose(size, FULL if is_faster else BREAKABLE, step_sec=seconds)
        else:
            reason = f"full needs {needed / 2**20:.0f} MiB of the pool, there are {limit / 2**20:.0f}"
            self._choose(size, BREAKABLE, reason, seconds)
        return limit

    def _capture_bucket(self, size: int) -> None:
        """With breaks where a full graph that was not timed cannot be had."""
        key = self.spec.key(size)
        try:
            super()._capture_bucket(size)
        except (CaptureError, torch.OutOfMemoryError) as error:
            if self.backend.has_breaks(key) or self.backend.was_timed(key):
                raise
            self._choose(size, BREAKABLE, f"no full graph: {str(error).splitlines()[0]}")
            super()._capture_bucket(size)

    def _captured_as(self, name: str, size: int, family: PlanFamily) -> Plan:
        self._choose(size, name)
        batch = self.spec.dummy_batch(size)
        fields = self._load(batch, size)
        with torch.no_grad(), use_step(self._plan_attention(batch, fields, in_bucket=True)):
            return family.capture(lambda: self.forward(fields), label=f"{name} {size}", breaks=name == BREAKABLE)

    def _replay_as(self, name: str, size: int, plan: Plan) -> None:
        """A step as it will be."""
        self._choose(size, name)
        with torch.no_grad(), self._ready_for_replay(self.spec.dummy_batch(size), size):
            plan.replay()


class AutoPrefillRunner(ChoosingRunner, PrefillRunner):
    """Attention metadata lies in request slots for a full graph, and covers the live requests otherwise."""

    def _attention_step(self, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool) -> AttentionStep:
        if in_bucket and not self.backend.has_breaks(self.spec.key(fields["slot_mapping"].shape[0])):
            return slotted_step(self.spec, batch, fields, in_bucket)
        return super()._attention_step(batch, fields, in_bucket)


class AutoDecodeRunner(ChoosingRunner, DecodeRunner):
    """Attention metadata is the static buffers in any case."""


def prefill_runner_class(backend: Backend) -> type[Runner]:
    """The runner whose metadata suits the backend."""
    if backend.chooses:
        return AutoPrefillRunner
    return SlottedPrefillRunner if backend.records_breaks else PrefillRunner


def decode_runner_class(backend: Backend) -> type[Runner]:
    """The runner that can choose where the backend does."""
    return AutoDecodeRunner if backend.chooses else DecodeRunner


def can_time(device: torch.device) -> bool:
    """The emulated device claims no speed."""
    return not get_device(device).emulated


def time_steps(steps: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Seconds of each step until the device is done, by turns; the median of a few."""
    synchronize, samples = get_device(device).synchronize, {name: list[float]() for name in steps}
    for number in range(_WARM_ROUNDS + _ROUNDS):
        if number >= _WARM_ROUNDS + _LONG_ROUNDS and sum(map(sum, samples.values())) > _LONG_SEC:
            break
        for name, step in steps.items():
            synchronize()
            started = time.perf_counter()
            step()
            synchronize()
            samples[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[_WARM_ROUNDS:]) for name, values in samples.items()}
