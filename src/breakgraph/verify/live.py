"""Verification while requests are served: some replayed steps are run again eagerly and compared."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from breakgraph.attention import KVCacheBuffers
from breakgraph.graph import get_device
from breakgraph.runners import Runner, StepBatch
from breakgraph.runners.admission import admit
from breakgraph.verify.arms import check_result
from breakgraph.verify.bisect import find_culprit
from breakgraph.verify.report import Verdict, VerifyReport
from breakgraph.verify.steps import RunnerCase, read_slots, slots_of, write_slots

logger = logging.getLogger(__name__)

MAX_FULL_REPORTS = 3
"""Wrong steps that are taken apart and logged; later ones are counted."""


class LiveCheck:
    """Runs steps, and a sample of them twice. What it returns is always the replay's, and so is the KV afterwards.

    Nothing is poisoned. The slots that a step writes, and the random generators, are put back before each further run,
    and hold the replay's values again at the end.

    Args:
        fraction: Of the steps, drawn with ``seed``.
        kv: The cache that the runners write.
        model_tensors: Parameters and buffers: where a forward changes one, no step can be run again.
    """

    def __init__(self, fraction: float, seed: int, kv: KVCacheBuffers, model_tensors: Sequence[Tensor]) -> None:
        self._fraction = fraction
        self._random = random.Random(seed)
        self._kv = kv
        self._model_tensors = model_tensors
        self._stateful: set[str] = set()
        self._verdicts: Counter[Verdict] = Counter()
        self._skipped: Counter[str] = Counter()

    def look_for_state(self, runners: Iterable[Runner]) -> None:
        """Run a step of each runner, to see whether it changes the model. Writes KV to the reserved slot only."""
        for runner in runners:
            before = self._versions()
            runner.warm_up()
            if self._versions() != before:
                self._stateful.add(runner.spec.phase)

    def run(self, runner: Runner, batch: StepBatch) -> Tensor:
        """:meth:`Runner.run`, checked if the draw says so."""
        if self._random.random() >= self._fraction:
            return runner.run(batch)
        reason = admit(runner.spec, runner.backend, batch.num_tokens, batch.num_reqs)
        if reason is not None or runner.spec.phase in self._stateful:
            self._skipped["model_state" if reason is None else f"eager_{reason.value}"] += 1
            return runner.run(batch)
        return self._run_checked(runner, batch)

    def stats(self) -> dict[str, Any]:
        """JSON-able counts."""
        counts = {f"num_{verdict.value}": self._verdicts[verdict] for verdict in _VERDICTS}
        return {**counts, "num_skipped_by_reason": dict(self._skipped)}

    def _run_checked(self, runner: Runner, batch: StepBatch) -> Tensor:
        device, slots = get_device(runner.device), slots_of(batch, runner.device)
        start, rng = read_slots(self._kv, slots), device.rng_state()
        logits = runner.run(batch).clone()
        written, rng_after = read_slots(self._kv, slots), device.rng_state()
        watched = sorted({int(block) for table in batch.block_tables for block in table})
        try:
            case = RunnerCase(runner, batch, self._kv, start=start, rng=rng, watched=watched, poisons=False)
            report = check_result(case, case.result(logits))
            self._verdicts[report.verdict] += 1
            if not report.ok:
                self._tell(case, VerifyReport(subject=runner.spec.phase, steps=(report,)))
        except Exception:
            # The step is done and its answer stands, whatever became of the check.
            logger.exception("a %s step could not be compared with eager", runner.spec.phase)
            self._skipped["check_raised"] += 1
        finally:
            write_slots(self._kv, slots, written)
            device.set_rng_state(rng_after)
        return logits

    def _tell(self, case: RunnerCase, report: VerifyReport) -> None:
        if self._verdicts[Verdict.DIFFERENT] > MAX_FULL_REPORTS:
            return
        culprit = find_culprit(case)
        found = VerifyReport(subject=report.subject, steps=report.steps, culprit=culprit)
        logger.error("a replayed step differs from eager; its answer is used as it is\n%s", found)

    def _versions(self) -> list[int]:
        return [t._version for t in self._model_tensors if not t.is_inference()]


_VERDICTS = (Verdict.EQUAL, Verdict.WITHIN_SPREAD, Verdict.DIFFERENT)
