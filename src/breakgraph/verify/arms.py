"""The arms of a verification: eager twice, replay in poisoned memory, eager on poisoned padding, eager unpadded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from breakgraph.graph import PlanFamily
from breakgraph.graph.tree import Tree, tree_leaves, tree_map
from breakgraph.verify.compare import Difference, differences, distance, spread, within
from breakgraph.verify.report import StepReport, Verdict

NUM_SPREAD_RUNS = 4
"""Eager runs from which their spread is taken, once two of them differ."""
SPREAD_FACTOR = 2.0
"""How much farther from the nearest eager run than these are from each other a replay may be."""


class Case(ABC):
    """One step of one plan. Every arm starts from the same inputs, state and random numbers.

    An arm's result is the outputs and whatever else the step writes, all of it cloned.

    Attributes:
        step: What is run, in words.
        breaks: Whether marked calls are breaks of the plan, and not recorded in it.
    """

    def __init__(self, family: PlanFamily, step: str, breaks: bool) -> None:
        self.family = family
        self.step = step
        self.breaks = breaks

    @abstractmethod
    def eager(self) -> Tree:
        """The forward as plain Python, on the plan's own inputs."""

    @abstractmethod
    def replay(self) -> Tree:
        """The plan, after everything in its pool and in its inputs was overwritten."""

    def poisoned_tails(self) -> Tree | None:
        """As :meth:`eager`, rows past the live ones holding NaN where breaks may leave them; None without padding."""
        return None

    def raw(self) -> Tensor | None:
        """The outputs without padding; None when nothing is padded."""
        return None

    @abstractmethod
    def ready(self) -> AbstractContextManager[Callable[[], Tree]]:
        """The forward with the step's inputs in place, for who runs it himself."""

    @abstractmethod
    def ready_for_capture(self) -> AbstractContextManager[Callable[[], Tree]]:
        """The forward with the inputs that the plan was captured on in place."""

    def poison(self) -> None:
        """Overwrite every byte of the pool: between replays nothing in it is declared to stay."""
        self.family.device.synchronize()
        self.family.poison()


class Checked:
    """A step's report, and what was kept for it."""

    def __init__(self, report: StepReport, kept_bytes: int) -> None:
        self.report = report
        self.kept_bytes = kept_bytes


def check(case: Case) -> Checked:
    """Run every arm of a step and compare."""
    eager = _EagerRuns(case)
    try:
        got = case.replay()
    except Exception as error:  # eager has run: whatever this is, the replay does something else
        text = " ".join(f"{type(error).__name__}: {error}".split())
        report = StepReport(step=case.step, verdict=Verdict.REFUSED, spread=eager.spread, error=text)
        return Checked(report, eager.kept_bytes)
    report = eager.compare(got)
    del got
    return Checked(eager.with_padding(report) if report.ok else report, eager.kept_bytes)


def check_result(case: Case, got: Tree) -> StepReport:
    """Compare what a replay gave already with eager runs of the same step."""
    return _EagerRuns(case).compare(got)


class _EagerRuns:
    """Two eager runs of a step; some more where they differ, and how far they are apart."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._runs = [case.eager(), case.eager()]
        self._allowed: list[float] | None = None
        self.spread: float | None = None
        if differences(self._runs[1], self._runs[0]):
            self._runs += [case.eager() for _ in range(NUM_SPREAD_RUNS - len(self._runs))]
            gaps = spread(self._runs)
            self.spread, self._allowed = max(gaps), [SPREAD_FACTOR * gap for gap in gaps]
        self.kept_bytes = (len(self._runs) + 1) * num_bytes(self._runs[0])
        if self._allowed is None:
            del self._runs[1]

    def compare(self, got: Tree) -> StepReport:
        """The verdict on a replay."""
        wrong = self._unexplained(got)
        good = Verdict.EQUAL if self._allowed is None else Verdict.WITHIN_SPREAD
        verdict = Verdict.DIFFERENT if wrong else good
        return StepReport(step=self._case.step, verdict=verdict, differences=tuple(wrong), spread=self.spread)

    def with_padding(self, report: StepReport) -> StepReport:
        """The report of a good replay, with what padding does to eager runs."""
        poisoned = self._case.poisoned_tails()
        wrong = [] if poisoned is None else self._unexplained(poisoned)
        raw = self._case.raw()
        if raw is None:
            return report
        padded = next(leaf for _, leaf in tree_leaves(self._runs[0]) if isinstance(leaf, Tensor))
        if not wrong and not torch.equal(torch.isfinite(padded), torch.isfinite(raw)):
            wrong = differences(padded, raw, "output with padding against without")
        verdict = Verdict.PADDING if wrong else report.verdict
        return replace(report, verdict=verdict, differences=tuple(wrong), rounding=distance(padded, raw)[1])

    def _unexplained(self, got: Tree) -> list[Difference]:
        """The differences, unless eager runs are as far from each other."""
        found = differences(got, self._runs[0], "result")
        return [] if self._allowed is not None and within(got, self._runs, self._allowed) else found


def cloned(tree: Tree) -> Tree:
    """The same containers with tensors of their own."""
    return tree_map(lambda leaf, _: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def num_bytes(tree: Tree) -> int:
    """Of the tensors in ``tree``."""
    return sum(leaf.nbytes for _, leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
