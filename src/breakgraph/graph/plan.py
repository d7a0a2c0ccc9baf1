"""A captured plan: its steps in order, how they are replayed, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from breakgraph.errors import ClosedError, StaleOutputError, StalePlanError
from breakgraph.graph.boundary import ResultStore
from breakgraph.graph.device import Device, Pool, RecordedCall, Segment
from breakgraph.graph.eager_break import BreakSpec
from breakgraph.graph.fingerprint import Fingerprint
from breakgraph.graph.host_time import HostTimes
from breakgraph.graph.live import has_live, resolved
from breakgraph.graph.modes import ExecMode
from breakgraph.graph.report import CaptureCost, PlanReport, StepReport
from breakgraph.graph.tree import Tree, describe, is_constant, tree_leaves, tree_map
from breakgraph.graph.watch import BreakWatcher

if TYPE_CHECKING:
    from breakgraph.graph.family import PlanFamily

OutputPolicy = Literal["borrow", "copy", "poison"]
StepScope = Callable[[str], AbstractContextManager[object]]
"""From a step's name to what its launch is wrapped in."""


def _call_resolved(fn: Callable[..., Tree], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tree:
    args, kwargs = resolved(args, kwargs)
    return fn(*args, **kwargs)


class GraphStep:
    """One captured segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.run = segment.replay

    @property
    def is_launched(self) -> bool:
        """False for a segment that holds nothing."""
        return self.segment.num_nodes > 0

    def recorded(self, outside: dict[int, int]) -> list[RecordedCall]:
        """See :meth:`Segment.recorded`."""
        return self.segment.recorded(outside)

    def report(self, index: int) -> StepReport:
        """For ``explain()``."""
        return StepReport("segment", str(index), num_ops=self.segment.num_ops, num_nodes=self.segment.num_nodes)


class EagerStep:
    """One eager break: a function, arguments that stay right or what was bound to them, and where its result goes."""

    is_launched = True

    def __init__(
        self,
        device: Device,
        pool: Pool,
        spec: BreakSpec,
        fn: Callable[..., Tree],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        mutated: Sequence[torch.Tensor],
    ) -> None:
        self.spec = spec
        self.tensors = tensors
        self.mutated = mutated
        self.writable = list(mutated)
        self.side_streams: list[Any] = []
        self.mode: ExecMode | None = None
        self.results: ResultStore | None = None
        self._device = device
        self._pool = pool
        self._args = args
        self._kwargs = kwargs
        if spec.bind is not None:
            self._invoke = spec.bind(*args, **kwargs)
        elif has_live(args, kwargs):
            self._invoke = partial(_call_resolved, fn, args, kwargs)
        else:
            self._invoke = partial(fn, *args, **kwargs)

    def scope(self) -> AbstractContextManager[Any]:
        """What every run of the break is wrapped in."""
        return self._device.break_scope(self._pool, self.writable)

    def call(self) -> Tree:
        """Run the function under its own modes, if it has some; the result is not stored yet."""
        if self.mode is None:
            return self._call_joined()
        with self.mode.apply():
            return self._call_joined()

    def _call_joined(self) -> Tree:
        if not self.side_streams:
            return self._invoke()
        self._device.fork(self.side_streams)
        try:
            return self._invoke()
        finally:
            self._device.join(self.side_streams)

    def run(self) -> None:
        """Run the function and hand its result on."""
        assert self.results is not None
        with self.scope():
            self.results.store(self.call(), self.mutated)

    def run_watched(self, watcher: BreakWatcher) -> None:
        """:meth:`run`, and show the break's tensors before and after."""
        assert self.results is not None
        watcher.before(self.spec, self.tensors, self.mutated)
        self.run()
        watcher.after(self.spec, self.mutated, [boundary.view for boundary in self.results.boundaries])

    def recorded(self, outside: dict[int, int]) -> list[RecordedCall]:
        """The constants among the arguments, which stay those of the capture."""
        leaves = [*tree_leaves(list(self._args), "argument "), *tree_leaves(self._kwargs, "argument ")]
        return [RecordedCall(self.spec.name, {path: describe(leaf) for path, leaf in leaves if is_constant(leaf)})]

    def report(self, index: int) -> StepReport:
        """For ``explain()``."""
        assert self.results is not None
        copied = sum(boundary.nbytes for boundary in self.results.boundaries)
        return StepReport(
            "break",
            self.spec.name,
            arguments=len(self.tensors),
            boundary_bytes=copied,
            side_streams=len(self.side_streams),
            reason=self.spec.reason,
        )


class Plan:
    """The segments and breaks captured for one shape.

    Owns: its segments, boundary views, and pins on what it reads. Borrows: the family's pool, stream, output buffer.
    Closed by: whoever asked for it, or its family.
    """

    def __init__(
        self,
        family: PlanFamily,
        label: str,
        steps: Sequence[GraphStep | EagerStep],
        pins: Sequence[torch.UntypedStorage],
        places: Tree,
        mode: ExecMode,
        output_policy: OutputPolicy,
        cost: CaptureCost,
        notes: tuple[str, ...],
        fingerprint: Fingerprint,
    ) -> None:
        self.label = label
        self.num_replays = 0
        self._family = family
        self._steps = list(steps)
        self._launches = [step.run for step in steps if step.is_launched]
        self._checks_late = family.checks_late and family.ranks is None
        self._host_times = HostTimes(len(self._launches))
        self._pins = list(pins)
        self._places = places
        self._mode = mode
        self._policy = output_policy
        self._copied: Tree = None
        self._cost = cost
        self._notes = notes
        self._fingerprint: Fingerprint | None = fingerprint
        self._is_stale = False
        self._is_closed = False

    @property
    def num_segments(self) -> int:
        """Captured segments, empty ones included."""
        return sum(isinstance(step, GraphStep) for step in self._steps)

    @property
    def num_breaks(self) -> int:
        """Eager breaks."""
        return len(self._steps) - self.num_segments

    def replay(self) -> Tree:
        """Run the plan on what its static inputs hold now.

        Returns:
            The outputs; see :attr:`outputs`.

        Raises:
            ClosedError: the plan was closed.
            StalePlanError: a weight that it reads was replaced or moved, a module's mode or the version token changed,
                or the plan was invalidated. Nothing ran; with the family's ``checks_late`` all of it may have.
            RankMismatchError: another rank of the family's group replays something else. Nothing ran.
            ReplayError: a break broke its contract. The outputs are void, the plan stays usable; an exception of the
                break's own arrives unchanged, with the same effect.
        """
        family = self._family
        family.check_not_recording(self)
        turns = family.turns
        with turns.lock:  # as Turns.turn does it; Turns says why here
            turns.check("a replay")
            try:
                turns.busy = "a replay"
                family.begin_replay(self)
                with self._mode.apply():
                    self._launch(family)
                if self._policy != "borrow":
                    self._copied = tree_map(lambda t, _: t.clone() if isinstance(t, torch.Tensor) else t, self._places)
                if self._policy == "poison":
                    family.lend([leaf for _, leaf in tree_leaves(self._copied) if isinstance(leaf, torch.Tensor)])
                family.end_replay(self)
            finally:
                turns.busy = None
        self.num_replays += 1
        return self._places if self._policy == "borrow" else self._copied

    def _launch(self, family: PlanFamily) -> None:
        launches: Sequence[Callable[[], None]] = self._launches
        if family.watcher is not None:
            launches = self._watched(family.watcher)
        if family.step_scope is not None:
            launches = self._annotated(launches, family.step_scope)
        launches = self._host_times.timed(launches, self.num_replays)
        try:
            for launch in launches:
                launch()
        except Exception:
            if self._checks_late:  # what a stale plan ran into is no news beside that
                self.check()
            raise
        if self._checks_late:
            self.check()

    def _watched(self, watcher: BreakWatcher) -> list[Callable[[], None]]:
        steps = [step for step in self._steps if step.is_launched]
        return [s.run if isinstance(s, GraphStep) else partial(s.run_watched, watcher) for s in steps]

    def _annotated(self, launches: Sequence[Callable[[], None]], scope: StepScope) -> list[Callable[[], None]]:
        named = [(step, f"{report.kind} {report.name}") for step, report in self._step_reports()]
        names = [name for step, name in named if step.is_launched]

        def run_inside(name: str, launch: Callable[[], None]) -> None:
            with scope(name):
                launch()

        return [partial(run_inside, name, launch) for name, launch in zip(names, launches, strict=True)]

    def _step_reports(self) -> list[tuple[GraphStep | EagerStep, StepReport]]:
        """Steps with their reports; segments are numbered, the empty ones too."""
        segments = iter(range(len(self._steps)))
        return [(step, step.report(next(segments) if isinstance(step, GraphStep) else 0)) for step in self._steps]

    @property
    def outputs(self) -> Tree:
        """Outputs of the last replay, in the structure that the captured function returned.

        With ``outputs="borrow"`` these are views of memory that the next replay of any plan of the family overwrites;
        with ``"copy"`` they are the caller's own. ``"poison"`` lends as ``"borrow"`` does and is for finding who keeps
        them too long: each replay gives new tensors, and the next one of the family fills them with 0xFF bytes (NaN).

        Raises:
            ClosedError: the plan was closed.
            StaleOutputError: borrowed outputs, and another plan has replayed since, or this one failed or never did.
        """
        self._check_open()
        if self._policy == "copy" and self._copied is not None:
            return self._copied
        if not self._family.is_last(self):
            raise StaleOutputError(
                f"the outputs of {self.label or 'this plan'} are not there: it has not replayed, its last replay "
                'failed, or another plan has overwritten them; read them before the next replay or use outputs="copy"'
            )
        return self._places if self._policy == "borrow" else self._copied

    def check(self) -> None:
        """Raise ClosedError or StalePlanError, as :meth:`replay` does, if the plan cannot be replayed."""
        self._check_open()
        assert self._fingerprint is not None
        self._fingerprint.check()

    def check_first(self) -> None:
        """What of :meth:`check` has to come before the first segment. The device is idle as long as this takes."""
        if self._checks_late:
            self._check_open()
        else:
            self.check()

    @property
    def is_closed(self) -> bool:
        """Whether the plan was closed or invalidated."""
        return self._is_closed

    def _check_open(self) -> None:
        name = self.label or "plan"
        if self._is_stale:
            raise StalePlanError(f"{name} was invalidated; capture it again")
        if self._is_closed:
            raise ClosedError(f"{name} was closed; capture it again")

    def explain(self) -> PlanReport:
        """What was captured and what it holds."""
        tensors = [leaf for _, leaf in tree_leaves(self._places) if isinstance(leaf, torch.Tensor)]
        times = iter(self._host_times.medians())
        return PlanReport(
            label=self.label,
            device=str(self._family.device.torch_device),
            emulated=self._family.device.emulated,
            steps=tuple(
                replace(report, host_sec=next(times)) if step.is_launched else report
                for step, report in self._step_reports()
            ),
            output_bytes=sum(t.numel() * t.element_size() for t in tensors),
            pinned_bytes=sum(pin.nbytes() for pin in self._pins),
            replays=self.num_replays,
            notes=self._notes,
            **asdict(self._cost),
        )

    def recorded(self) -> list[list[RecordedCall]]:
        """For each step what it calls, for an audit: operators or kernels of a segment, one call for a break."""
        self._check_open()
        outside: dict[int, int] = {}
        return [step.recorded(outside) for step in self._steps]

    def close(self) -> None:
        """Give up the plan. Its graphs are destroyed when the family closes: destroying one earlier can free a library
        workspace that the other graphs of the capture stream still use (pytorch #193402)."""
        if self._is_closed:
            return
        self._is_closed = True
        self._family.park(self, [step.segment for step in self._steps if isinstance(step, GraphStep)])
        self._steps, self._launches, self._pins = [], [], []
        self._places = self._copied = self._fingerprint = None

    def invalidate(self) -> None:
        """Close the plan because what it reads is no longer right; a later replay raises StalePlanError."""
        if not self._is_closed:
            self.close()
            self._is_stale = True
