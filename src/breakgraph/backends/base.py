"""The backend contract, and the one store of plans that the capturing backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from breakgraph.errors import CaptureError, ReplayError

if TYPE_CHECKING:
    from torch import Tensor

    from breakgraph.graph import OnHazard, OutputPolicy, Plan, PlanFamily, PlanReport, ShapeKey

Tree = Any
"""A tensor, a constant, or a container of trees."""
CompileForward = Callable[[Callable[[], None]], Callable[[], Tree]]
"""See :meth:`PlanFamily.capture`."""


class Backend(ABC):
    """Makes forwards replayable under a key.

    Borrows: the plan family (one replay at a time across all that share it).
    """

    name: ClassVar[str]
    captures: ClassVar[bool]
    """False: a replay is the plain call, so a runner need not pad for it."""
    records_breaks: ClassVar[bool]
    """True: marked calls end up inside the graph, so they must read nothing but static tensors."""
    chooses: ClassVar[bool] = False
    """Whether it is for runners only, which choose what a key is captured as."""
    compiles: ClassVar[bool] = False
    """True: it traces the whole forward, so nothing in that may be compiled already."""

    def __init__(self, family: PlanFamily) -> None:
        self.family = family

    @abstractmethod
    def capture(
        self,
        key: ShapeKey,
        forward: Callable[[], Tree],
        state: Sequence[Tensor] = (),
        outputs: OutputPolicy = "borrow",
        on_hazard: OnHazard | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        """Publish a plan of ``forward`` under ``key``, or nothing.

        Args:
            forward: Reads tensors at fixed addresses only; returns a tree of tensors.
            state: Tensors that ``forward`` writes and that capture must put back.
            outputs: Whether replays lend their outputs or give copies.
            on_hazard: See :meth:`PlanFamily.capture`; means nothing to a backend that records nothing.
            version: See :meth:`PlanFamily.capture`; the same.

        Raises:
            CaptureError: ``key`` is taken, or the capture failed.
        """

    @abstractmethod
    def replay(self, key: ShapeKey) -> Tree:
        """Outputs of the plan; borrowed ones are overwritten by the family's next replay.

        Raises:
            ReplayError: nothing is captured under ``key``.
            StalePlanError: what was captured was invalidated since, or is out of date.
        """

    @abstractmethod
    def captured(self, key: ShapeKey) -> bool:
        """Whether :meth:`replay` of ``key`` is possible. Reads host values only."""

    def has_breaks(self, key: ShapeKey) -> bool:
        """Whether marked calls are breaks of the plan under ``key``, and not recorded in it."""
        return not self.records_breaks

    def reference(self, key: ShapeKey, forward: Callable[[], Tree]) -> Callable[[], Tree]:
        """What replays of ``key`` are compared with, bit by bit: ``forward``, unless other kernels compute the same."""
        return forward

    @abstractmethod
    def explain(self) -> dict[ShapeKey, PlanReport]:
        """What was captured, by key."""

    @abstractmethod
    def release(self, key: ShapeKey) -> None:
        """Close one plan; unknown keys are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Close every plan. The family stays open."""


def already_captured(name: str, key: ShapeKey) -> CaptureError:
    """The error of a second capture under one key."""
    return CaptureError(f"backend {name!r}: {key} is already captured; release it first")


def not_captured(name: str, key: ShapeKey, captured: Iterable[ShapeKey]) -> ReplayError:
    """The error of a replay without a capture."""
    listed = ", ".join(map(str, captured)) or "none"
    return ReplayError(f"backend {name!r}: {key} is not captured (captured: {listed}); capture it first")


class PlanBackend(Backend):
    """A backend whose replays are plans of the family. Owns the plans; closed by its runner."""

    captures = True

    def __init__(self, family: PlanFamily) -> None:
        super().__init__(family)
        self._plans: dict[ShapeKey, Plan] = {}

    def capture(
        self,
        key: ShapeKey,
        forward: Callable[[], Tree],
        state: Sequence[Tensor] = (),
        outputs: OutputPolicy = "borrow",
        on_hazard: OnHazard | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        if self.captured(key):
            raise already_captured(self.name, key)
        try:
            self._plans[key] = self.family.capture(
                self._recorded(forward),
                label=str(key),
                breaks=self.has_breaks(key),
                state=state,
                outputs=outputs,
                on_hazard=on_hazard,
                version=version,
                compiler=self._compiler(key, forward),
            )
        except BaseException:
            self._drop(key)
            raise

    def _recorded(self, forward: Callable[[], Tree]) -> Callable[[], Tree]:
        """What is captured as ``forward``."""
        return forward

    def _drop(self, key: ShapeKey) -> None:
        """Let go of what was made for a plan besides it: the capture failed, or the plan is closed."""

    def _compiler(self, key: ShapeKey, forward: Callable[[], Tree]) -> CompileForward | None:
        """What gives, after the warm-up, what is captured in the place of ``forward``; None: nothing does."""
        return None

    def replay(self, key: ShapeKey) -> Tree:
        plan = self._plans.get(key)
        if plan is None:
            raise not_captured(self.name, key, self._plans)
        return plan.replay()

    def captured(self, key: ShapeKey) -> bool:
        return key in self._plans and not self._plans[key].is_closed

    def explain(self) -> dict[ShapeKey, PlanReport]:
        return {key: plan.explain() for key, plan in self._plans.items() if not plan.is_closed}

    def release(self, key: ShapeKey) -> None:
        plan = self._plans.pop(key, None)
        if plan is not None:
            plan.close()
        self._drop(key)

    def close(self) -> None:
        for key in list(self._plans):
            self.release(key)
