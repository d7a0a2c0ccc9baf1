"""The decode step that the device gets before the host has the tokens of the step before it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from breakgraph.engine.sampler import put
from breakgraph.engine.scheduler import ScheduledRow, ScheduledStep, Scheduler
from breakgraph.engine.step_batch import PreparedDecode, PreparedRow
from breakgraph.runners import StepBatch

logger = logging.getLogger(__name__)


class NotAhead(Enum):
    """Why the step that follows another one was not launched ahead of its tokens. The values appear in stats."""

    LIVE_CHECK = "live_check"
    """A step that is compared with eager has to be over before the next one."""
    GUIDES = "guides"
    LOGPROBS = "logprobs"
    CHUNKS = "chunks"
    """Part of a prompt is left to compute."""
    WAITING = "waiting"
    """A waiting request may start."""
    NO_BLOCKS = "no_blocks"
    """A request may have to give way."""
    ALL_END = "all_end"
    """Nobody goes on."""
    RAISED = "raised"


@dataclass(frozen=True)
class _Launched:
    """A step on the device: what it gives, or what its launch raised."""

    rows: list[PreparedRow]
    logits_RV: Tensor | Exception


class StepAhead:
    """At most one step that was launched and not scheduled: the decode step of all who surely go on but for their
    tokens, which the step before it leaves on the device.

    Nothing of it is booked, or drawn, before the step before it is booked. Then the rows of those that ended meanwhile
    are void: their logits are looked at by nobody, and their blocks may be others' at once, as whatever writes to those
    comes behind this step on the same stream. A request that comes after the launch starts in the step after this one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._launched: _Launched | None = None
        self._num_launched = 0
        self._num_void_rows = 0
        self._reasons: Counter[NotAhead] = Counter()

    def why_not(self, step: ScheduledStep, *, is_checked: bool) -> NotAhead | None:
        """What keeps the step after `step`, which is not drawn yet, from being launched ahead; None when nothing does
        unless it is blocks. Takes none."""
        requests = [row.request for row in step.rows]
        if is_checked:
            return NotAhead.LIVE_CHECK
        if any(request.guide is not None for request in requests):
            return NotAhead.GUIDES
        if any(r.params.logprobs is not None or r.wants_prompt_logprobs for r in requests):
            return NotAhead.LOGPROBS
        if len(requests) < len(self._scheduler.running) or not all(row.needs_sample for row in step.rows):
            return NotAhead.CHUNKS
        if all(request.ends_by_next_token for request in requests):
            return NotAhead.ALL_END
        return NotAhead.WAITING if self._scheduler.may_admit_after(step) else None

    def prepare(self, step: ScheduledStep) -> PreparedDecode:
        """The decode step that may follow `step`, with the blocks that it needs if there are enough."""
        self._scheduler.take_ahead(step)
        return PreparedDecode.after(step, self._scheduler.block_size)

    def next_step(self, step: ScheduledStep, *, is_checked: bool) -> PreparedDecode | None:
        """What to `launch` behind `step`. None, or a step that lacks blocks, when that cannot be, which is counted by
        its reason."""
        reason, prepared = self.why_not(step, is_checked=is_checked), None
        if reason is None:
            prepared = self.prepare(step)
            reason = NotAhead.NO_BLOCKS if prepared.lacks_blocks else None
        if reason is not None:
            self._reasons[reason] += 1
        return prepared

    def launch(
        self,
        prepared: PreparedDecode,
        step: ScheduledStep,
        token_ids_R: Tensor,
        run: Callable[[StepBatch], Any],
    ) -> None:
        """Gives the device the step that follows `step`, whose tokens [R], one a row, were drawn there.

        What it raises is raised by `take`: the step before it is none the worse.
        """
        place_of = {row.request: place for place, row in enumerate(step.rows)}
        places = [place_of[row.request] for row in prepared.rows]
        try:
            if places != list(range(len(step.rows))):
                token_ids_R = token_ids_R.index_select(0, put(places, torch.int64, token_ids_R.device))
            logits_RV = run(prepared.batch_of_all(token_ids_R))
        except Exception as error:
            self._reasons[NotAhead.RAISED] += 1
            self._launched = _Launched(prepared.rows, error)
            return
        self._num_launched += 1
        self._launched = _Launched(prepared.rows, logits_RV)

    def take(self) -> tuple[ScheduledStep, Tensor] | None:
        """What of the launched step is not void, and its logits; None when there is none."""
        launched = self._launched
        if launched is None:
            return None
        live = [place for place, row in enumerate(launched.rows) if row.holds]
        if not live:
            self.drop()
            return None
        self._launched = None
        if isinstance(launched.logits_RV, Exception):
            try:
                raise launched.logits_RV
            finally:
                del launched  # no cycle: what the launch's frames hold goes with the exception
        self._num_void_rows += len(launched.rows) - len(live)
        logits_RV = launched.logits_RV
        if len(live) < len(launched.rows):
            logits_RV = logits_RV.index_select(0, put(live, torch.int64, logits_RV.device))
        rows = tuple(ScheduledRow(launched.rows[place].request, 1) for place in live)
        return ScheduledStep(rows, is_decode=True), logits_RV

    def drop_if_void(self) -> None:
        """Forgets a step of which nobody is left."""
        if self._launched is not None and not any(row.holds for row in self._launched.rows):
            self.drop()

    def drop(self) -> None:
        """Forgets the launched step: its requests compute its tokens again, if they go on."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        if isinstance(launched.logits_RV, Exception):
            logger.error("a step that was launched ahead failed, and is not needed", exc_info=launched.logits_RV)
        else:
            self._num_void_rows += len(launched.rows)

    def stats(self) -> dict[str, Any]:
        """JSON-able counts. Any thread may ask."""
        return {
            "num_launched": self._num_launched,
            "num_void_rows": self._num_void_rows,
            "num_not_launched_by_reason": {reason.value: count for reason, count in dict(self._reasons).items()},
        }
