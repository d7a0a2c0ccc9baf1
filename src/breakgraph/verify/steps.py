"""Verification of runners: random steps for every captured bucket, on KV blocks that belong to nobody."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from breakgraph.attention import KVCacheBuffers
from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.graph import BreakWatcher, get_device, watch_eager
from breakgraph.graph.eager_break import BreakSpec
from breakgraph.graph.tree import Tree
from breakgraph.runners import Runner, StepBatch
from breakgraph.verify.arms import Case, check
from breakgraph.verify.batches import Limits, describe, random_batch, sizes_of
from breakgraph.verify.bisect import find_culprit
from breakgraph.verify.compare import digest
from breakgraph.verify.report import Culprit, StepReport, Verdict, VerifyReport, VerifySummary

NUM_ROUNDS = 3
_UNDEFINED = (
    "it leaves the rows past the live ones as they were, and something after it mixes rows; declare valid_rows=, or "
    "fill them in the break"
)
NUM_BYSTANDERS = 2
"""Blocks of no request, which must be the same afterwards."""


class RunnerCase(Case):
    """One step of a runner.

    Args:
        start: What the slots that the step writes hold before it, see :func:`read_slots`; None: zeros.
        rng: State of the random generators before it.
        watched: KV blocks in which nothing but those slots may change.
        poisons: Whether pool and inputs may be overwritten: not while somebody is served.

    Attributes:
        undefined_by: The first break that was seen to leave rows past the live ones as they were.
    """

    def __init__(
        self,
        runner: Runner,
        batch: StepBatch,
        kv: KVCacheBuffers,
        *,
        start: Sequence[Tensor] | None,
        rng: Any,
        watched: Sequence[int],
        poisons: bool = True,
    ) -> None:
        bucket = runner.spec.bucket_for(batch.num_tokens, batch.num_reqs)
        breaks = bucket is None or runner.backend.has_breaks(runner.spec.key(bucket))
        super().__init__(runner.backend.family, describe(batch), breaks)
        self._runner = runner
        self._batch = batch
        self._kv = kv
        self._start = start
        self._rng = rng
        self._poisons = poisons
        self.undefined_by: str | None = None
        self._slots = slots_of(batch, runner.device)
        self._watched = torch.tensor(list(watched), device=runner.device)
        self._bucket = bucket

    def reset(self) -> None:
        """KV and random generators as before the step."""
        write_slots(self._kv, self._slots, self._start)
        self.family.device.set_rng_state(self._rng)

    def result(self, logits: Tensor) -> Tree:
        """Logits, the KV that was written, and a digest of the blocks around it."""
        return {
            "logits": logits,
            "written KV": read_slots(self._kv, self._slots),
            "KV of the blocks": torch.cat([digest(t.index_select(0, self._watched)) for t in _tensors_of(self._kv)]),
        }

    def eager(self) -> Tree:
        self.reset()
        return self.result(self._runner.run_padded_eager(self._batch))

    def replay(self) -> Tree:
        self.reset()
        self.poison()
        return self.result(self._runner.run_replay(self._batch))

    def poisoned_tails(self) -> Tree | None:
        if self._num_padding == 0:
            return None
        self.reset()
        tails = _TailPoison(self._batch.num_tokens, self._batch.num_tokens + self._num_padding)
        reserved = torch.tensor([RESERVED_BLOCK], device=self._runner.device)
        before = [t.index_select(0, reserved) for t in _tensors_of(self._kv)]
        try:
            with watch_eager(tails):
                result = self.result(self._runner.run_padded_eager(self._batch))
        finally:  # padding rows write keys and values there, and masked reads of them must stay finite
            for tensor, value in zip(_tensors_of(self._kv), before, strict=True):
                tensor.index_copy_(0, reserved, value)
        self.undefined_by = tails.left_by
        return result

    def raw(self) -> Tensor | None:
        if self._num_padding == 0:
            return None
        self.reset()
        return self._runner.run_eager(self._batch)

    @property
    def _num_padding(self) -> int:
        assert self._bucket is not None, "a step that fits no bucket has no replay to verify"
        return self._runner.spec.num_rows("tokens", self._bucket) - self._batch.num_tokens

    @contextmanager
    def ready(self) -> Iterator[Callable[[], Tree]]:
        self.reset()
        with self._runner.in_bucket(self._batch) as forward:
            yield forward

    @contextmanager
    def ready_for_capture(self) -> Iterator[Callable[[], Tree]]:
        assert self._bucket is not None, "a step that fits no bucket has no replay to verify"
        with self._runner.in_bucket(self._runner.spec.dummy_batch(self._bucket)) as forward:
            yield forward

    def poison(self) -> None:
        if self._poisons:
            super().poison()
            assert self._bucket is not None, "a step that fits no bucket has no replay to verify"
            self._runner.poison_inputs(self._bucket)


class _TailPoison(BreakWatcher):
    """Puts NaN into the padding rows of what a break writes, before it runs, and sees who leaves it there."""

    def __init__(self, num_live: int, num_rows: int) -> None:
        self._num_live = num_live
        self._num_rows = num_rows
        self.left_by: str | None = None

    def before(self, spec: BreakSpec, tensors: Sequence[Tensor], mutated: Sequence[Tensor]) -> None:
        for tail in self._tails(spec, mutated):
            tail.fill_(float("nan"))

    def after(self, spec: BreakSpec, mutated: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        if self.left_by is None and any(bool(tail.isnan().any()) for tail in self._tails(spec, mutated)):
            self.left_by = spec.name

    def _tails(self, spec: BreakSpec, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        for tensor in tensors:
            has_rows = tensor.dim() > spec.row_dim and tensor.shape[spec.row_dim] == self._num_rows
            if has_rows and tensor.is_floating_point():
                yield tensor.narrow(spec.row_dim, self._num_live, self._num_rows - self._num_live)


def verify_runners(
    runners: Iterable[Runner], kv: KVCacheBuffers, limits: Limits, *, rounds: int = NUM_ROUNDS, seed: int = 0
) -> VerifySummary:
    """Verify every captured bucket. What is in ``limits.blocks`` is lost.

    Args:
        runners: Captured, on ``kv``.
        kv: The cache.
        limits: What the steps may use.
        rounds: Steps a bucket: three have both ends of it and two partitions.
        seed: Of the steps and of what the cache holds.
    """
    started = time.perf_counter()
    rng = random.Random(seed)
    reports, kept, peaks = [], 0, []
    for runner in runners:
        device = get_device(runner.device)
        for size in runner.spec.ladder:
            if not (runner.backend.captures and runner.backend.captured(runner.spec.key(size))):
                continue
            checked = _Bucket(runner, kv, size, limits, rng, rounds)
            if device.emulated:
                checked.run()
            else:
                peaks.append(device.peak_of(checked.run).allocated_bytes or 0)
            kept = max(kept, checked.kept_bytes)
            reports.append(checked.report())
    return VerifySummary(
        reports=tuple(reports),
        seconds=time.perf_counter() - started,
        snapshot_bytes=kept,
        peak_bytes=max(peaks, default=None),
    )


class _Bucket:
    """The steps of one bucket, up to the first wrong one."""

    def __init__(
        self, runner: Runner, kv: KVCacheBuffers, size: int, limits: Limits, rng: random.Random, rounds: int
    ) -> None:
        self._runner = runner
        self._kv = kv
        self._size = size
        self._limits = limits
        self._rng = rng
        self._rounds = rounds
        self._steps: list[StepReport] = []
        self._wrong: RunnerCase | None = None
        self.kept_bytes = 0

    def run(self) -> None:
        """Every arm of every step."""
        spec = self._runner.spec
        for number, live in enumerate(sizes_of(spec, self._size, self._rng, self._rounds)):
            usable = self._limits.blocks[: max(1, len(self._limits.blocks) - NUM_BYSTANDERS)]
            limits = Limits(blocks=usable, vocab_size=self._limits.vocab_size, max_model_len=self._limits.max_model_len)
            batch = random_batch(spec, self._size, live, limits, self._rng, few=number % 2 == 0)
            if spec.bucket_for(batch.num_tokens, batch.num_reqs) != self._size:
                continue  # the blocks hold no step that is large enough
            case = self._case(batch)
            checked = check(case)
            self.kept_bytes = max(self.kept_bytes, checked.kept_bytes)
            self._steps.append(checked.report)
            if not checked.report.ok:
                self._wrong = case
                break

    def _case(self, batch: StepBatch) -> RunnerCase:
        bystanders = list(self._limits.blocks)[len(self._limits.blocks) - NUM_BYSTANDERS :]
        watched = sorted({*bystanders, *(block for table in batch.block_tables for block in table)})
        device = self._runner.device
        fill_blocks(self._kv, torch.tensor(watched, device=device), self._rng.randrange(1 << 31))
        rng = get_device(device).rng_state()
        return RunnerCase(self._runner, batch, self._kv, start=None, rng=rng, watched=watched)

    def report(self) -> VerifyReport:
        """What came out; finds the culprit of a wrong step."""
        culprit, wrong = None, self._wrong
        if wrong is not None and self._steps[-1].verdict is not Verdict.PADDING:
            culprit = find_culprit(wrong)
        elif wrong is not None and wrong.undefined_by is not None:
            culprit = Culprit(segment=None, break_name=wrong.undefined_by, hint=_UNDEFINED)
        return VerifyReport(subject=str(self._runner.spec.key(self._size)), steps=tuple(self._steps), culprit=culprit)


def slots_of(batch: StepBatch, device: torch.device) -> Tensor:
    """The KV slots that a step writes, [num_tokens] on the device."""
    return torch.tensor([int(slot) for slot in batch.slot_mapping], device=device)


def read_slots(kv: KVCacheBuffers, slots: Tensor) -> list[Tensor]:
    """Copies of what the slots hold, tensor by tensor."""
    return [t.flatten(0, 1).index_select(0, slots) for t in _tensors_of(kv)]


def write_slots(kv: KVCacheBuffers, slots: Tensor, values: Sequence[Tensor] | None) -> None:
    """The other way round; None is zeros."""
    if values is None:
        for tensor in _tensors_of(kv):
            tensor.flatten(0, 1).index_fill_(0, slots, 0)
        return
    for tensor, value in zip(_tensors_of(kv), values, strict=True):
        tensor.flatten(0, 1).index_copy_(0, slots, value)


def fill_blocks(kv: KVCacheBuffers, blocks: Tensor, seed: int) -> None:
    """Random keys and values, as a prefix would have left them."""
    generator = torch.Generator(blocks.device).manual_seed(seed)
    for tensor in _tensors_of(kv):
        shape = (len(blocks), *tensor.shape[1:])
        values = torch.randn(shape, generator=generator, device=blocks.device, dtype=torch.float32)
        tensor.index_copy_(0, blocks, values.to(tensor.dtype))


def _tensors_of(kv: KVCacheBuffers) -> list[Tensor]:
    return [tensor for buffers in (kv.key, kv.value) for tensor in buffers.values()]
