"""The facade for any callable: :func:`capture`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from breakgraph.backends import Backend, make_backend
from breakgraph.errors import ClosedError, ConfigError, StaleOutputError, StalePlanError, VerificationError
from breakgraph.graph import OnHazard, OutputPolicy, PlanFamily, PlanReport, ShapeKey
from breakgraph.graph.fingerprint import StaticInputs
from breakgraph.graph.modes import ExecMode
from breakgraph.graph.tree import Tree, tree_leaves
from breakgraph.verify import VerifyReport, verify_call
from breakgraph.verify.call import Call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KEY = ShapeKey("capture", 0)


class CapturedGraph:
    """One captured callable with a pool of its own. Made by :func:`capture`.

    Owns: its plan family and backend. Closed by: the caller, or the end of a ``with`` block.
    """

    def __init__(
        self, family: PlanFamily, backend: Backend, call: Call, capture_again: Callable[[], None]
    ) -> None:
        self._family = family
        self._backend = backend
        self._call: Call | None = call
        self._inputs = StaticInputs(call.inputs)
        self._capture_again = capture_again
        self._outputs: Tree = None
        self._is_closed = False

    def replay(self) -> Tree:
        """Run on what the static inputs hold now.

        Returns:
            The outputs, in the structure that the callable returns. See :attr:`outputs` for how long they are valid.

        Raises:
            ClosedError: the graph was closed.
            StalePlanError: a weight or a static input was replaced or moved, a module changed its mode, the version
                token differs, or the graph was invalidated: see :meth:`recapture`.
            RankMismatchError: another rank of the group replays something else. Nothing ran.
            ReplayError: a break broke its contract; the outputs are void, the graph stays usable.
        """
        self._check_open()
        self._outputs = None
        try:
            self._inputs.check()
        except StalePlanError as error:
            if self._family.ranks is not None:
                self._family.ranks.tell("a replay", error)
            raise
        self._outputs = self._backend.replay(_KEY)
        return self._outputs

    @property
    def outputs(self) -> Tree:
        """The last replay's outputs: overwritten by the next one, unless captured with ``outputs="copy"``.

        Raises:
            StaleOutputError: there was no replay, or the last one failed.
        """
        self._check_open()
        if self._outputs is None:
            raise StaleOutputError("there are no outputs: nothing was replayed yet, or the last replay failed")
        return self._outputs

    @property
    def pool_bytes(self) -> int:
        """Bytes that the graph's memory pool has reserved."""
        return self._family.pool_bytes

    def explain(self) -> PlanReport:
        """Segments, breaks, and what they hold; prints as text."""
        self._check_open()
        return self._backend.explain()[_KEY]

    def verify(self) -> VerifyReport:
        """Compare replays in poisoned memory with eager runs, on the values of the static inputs and on random ones.

        Inputs, ``state`` and random generators are as before when it returns; outputs have to be replayed again.

        Returns:
            ``ok``, and where the first difference comes from; prints as text.

        Raises:
            ClosedError: the graph was closed.
            ConfigError: it was captured with a group.
        """
        self._check_open()
        _check_alone(self._family)
        self._outputs = None
        assert self._call is not None, "an open graph has its callable"
        return verify_call(self._call)

    def invalidate(self) -> None:
        """Give up what was captured, because what it reads is no longer right; replays raise from here."""
        self._check_open()
        self._outputs = None
        self._family.invalidate()

    def recapture(self) -> None:
        """Capture the same callable again, with the same options, on what it uses now.

        The old graphs keep some driver memory until :meth:`close`.

        Raises:
            CaptureError: nothing was captured; replays raise until a capture succeeds.
        """
        self.invalidate()
        self._capture_again()
        assert self._call is not None, "an open graph has its callable"
        self._inputs = StaticInputs(self._call.inputs)

    def close(self) -> None:
        """Destroy the graphs and give their memory back. Safe to call twice."""
        self._is_closed = True
        self._outputs = self._call = None
        self._inputs = StaticInputs(())
        self._backend.close()
        self._family.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the captured graph was closed; capture it again")

    def __enter__(self) -> CapturedGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def capture(
    fn: Callable[..., Tree],
    *static_inputs: Any,
    backend: str = "breakable",
    outputs: OutputPolicy = "borrow",
    state: Sequence[torch.Tensor] = (),
    on_hazard: OnHazard = "raise",
    version: Callable[[], object] | None = None,
    verify: bool = False,
    group: ProcessGroup | None = None,
) -> CapturedGraph:
    """Capture ``fn(*static_inputs)`` as CUDA-graph segments with eager breaks between them.

    To run it on other values, copy them into the inputs (``x.copy_(...)``) and call :meth:`CapturedGraph.replay`.

    Args:
        fn: A module or function; marked calls in it (``eager_on_graph``, ``mark_eager``) run eagerly at every replay.
        static_inputs: What it is called with. The tensors among them must stay where they are.
        backend: ``"breakable"``, ``"full"`` (marked calls are recorded too), ``"debug_eager"`` (one break, nothing is
            recorded), or ``"tc_piecewise"`` and ``"tc_piecewise_inductor"`` (traced by ``torch.compile``, split at the
            marked calls).
        outputs: ``"borrow"`` (valid until the next replay), ``"copy"``, or ``"poison"`` to find out who keeps borrowed
            ones too long: the next replay fills them with NaN.
        state: Tensors that ``fn`` updates in place; capture leaves them as they were.
        on_hazard: What to do about operations that no graph can hold, and Python side effects that no replay repeats:
            ``"raise"`` lists all of them in one error, ``"break"`` makes the smallest module or function around each an
            eager break, ``"warn"`` warns and goes on.
        version: Called now and at every replay, which raises when the value differs. Parameters, buffers and modes of
            modules are watched without it.
        verify: Compare with eager before returning, see :meth:`CapturedGraph.verify`. Not with ``group``.
        group: Ranks that capture and replay this together, see :class:`PlanFamily`.

    Raises:
        ConfigError: inputs on several devices or none, a backend that does not capture, or a group that cannot be used.
        HazardError: there are hazards, and ``on_hazard`` is "raise", or is "break" and no break can be made.
        CaptureError: nothing was captured; an exception of ``fn``'s own arrives unchanged.
        RankMismatchError: the ranks of the group do not capture the same, or one of them failed.
        VerificationError: a replay differs from eager; nothing is kept of it.
    """
    family = PlanFamily(_one_device(fn, static_inputs), group)
    mode = ExecMode.current(family.device.torch_device.type)
    try:
        if verify:
            _check_alone(family)
        chosen = make_backend(backend, family)
        if not chosen.captures:
            raise ConfigError(f"expected a capturing backend, got {backend!r}; call the function, or use debug_eager")
        if chosen.chooses:
            raise ConfigError(f"backend {backend!r} chooses for each bucket of a runner; give the one to capture with")

        def capture_it() -> None:
            chosen.capture(_KEY, lambda: fn(*static_inputs), state, outputs, on_hazard, version)

        capture_it()
        call = Call(
            fn=lambda *inputs: chosen.reference(_KEY, lambda: fn(*inputs))(),
            inputs=static_inputs,
            state=state,
            replay=lambda: chosen.replay(_KEY),
            family=family,
            mode=mode,
            breaks=chosen.has_breaks(_KEY),
        )
        if verify:
            _raise_if_wrong(verify_call(call))
    except BaseException:
        family.close()
        raise
    return CapturedGraph(family, chosen, call, capture_it)


def _check_alone(family: PlanFamily) -> None:
    if family.ranks is not None:
        raise ConfigError(
            "expected no group= where replays are verified: a rank that finds a difference runs the function more "
            "often than the others, and its collectives would wait for them; verify a capture without collectives"
        )


def _raise_if_wrong(report: VerifyReport) -> None:
    if not report.ok:
        raise VerificationError(f"the replay differs from eager, so the capture was dropped\n{report}", report)


def _one_device(fn: Callable[..., Tree], static_inputs: Sequence[Any]) -> torch.device:
    tensors = [leaf for _, leaf in tree_leaves(static_inputs) if isinstance(leaf, torch.Tensor)]
    if not tensors and isinstance(fn, torch.nn.Module):
        tensors = [*fn.parameters(), *fn.buffers()]
    devices = {t.device for t in tensors}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no tensor"
        raise ConfigError(
            f"expected static inputs on one device, got {found}; move them, or pass the input tensors (wrap other "
            "signatures in a lambda)"
        )
    return devices.pop()
