"""Plans that share memory: one pool, one capture stream, one output buffer, one replay at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from breakgraph.errors import (
    CaptureError,
    CaptureUnavailableError,
    ConfigError,
    PoolLeakError,
)
from breakgraph.graph.builder import CaptureBuilder
from breakgraph.graph.device import Device, Segment, get_device
from breakgraph.graph.eager_break import active
from breakgraph.graph.fingerprint import Fingerprint, ModuleIndex
from breakgraph.graph.hazards import OnHazard
from breakgraph.graph.heap import between_walks
from breakgraph.graph.leaks import find_holders
from breakgraph.graph.modes import ExecMode, capture_window
from breakgraph.graph.outputs import OutputBuffer
from breakgraph.graph.plan import OutputPolicy, Plan, StepScope
from breakgraph.graph.ranks import Ranks
from breakgraph.graph.report import CaptureCost
from breakgraph.graph.restore import restored
from breakgraph.graph.tree import Tree
from breakgraph.graph.turns import Turns
from breakgraph.graph.warm_up import MadeBreaks, warm_up
from breakgraph.graph.watch import BreakWatcher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PlanFamily:
    """Captures plans into one pool and replays them one at a time.

    Owns: pool, capture stream, output buffer, its plans. Closed by: whoever made it.

    Args:
        device: Where the captured functions run, e.g. ``"cuda"`` or ``"cpu"`` (emulated).
        group: Ranks that capture and replay the same plans together, as tensor parallelism needs: what they want is
            compared before each capture and replay. Its backend has to take CPU tensors; best a group of its own.

    Raises:
        ConfigError: a device or a group that cannot be used.
    """

    def __init__(self, device: torch.device | str, group: ProcessGroup | None = None) -> None:
        self.device: Device = get_device(device)
        self.ranks = None if group is None else Ranks(group)
        self._pool = self.device.new_pool()
        self._stream = self.device.take_stream()
        self._outputs = OutputBuffer(self.device.torch_device)
        self.turns = Turns()
        self._plans: list[Plan] = []
        self._parked: list[Segment] = []
        self._last_plan: Plan | None = None
        self._lent: list[torch.Tensor] = []
        self._index = ModuleIndex()
        self._last_stream: Any = None
        self.checks_late = False
        """Whether plans captured from now on are checked behind their last launch: a stale one has run by then."""
        self.watcher: BreakWatcher | None = None
        self.step_scope: StepScope | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool has reserved on the device."""
        return 0 if self.turns.is_closed else self._pool.reserved_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of the shared output buffer."""
        return self._outputs.nbytes

    def reserve(self, *runs: int, output_bytes: int = 0) -> None:
        """Make room in the pool, and for the outputs, before the first capture.

        Plans whose tensors differ in size then split one run between them; without it each brings blocks of its own
        sizes, and the pool grows beyond what the largest plan needs. An output buffer that is made after a warm-up may
        lie in memory that the warm-up used, and keep all of that from going back to the driver.

        Args:
            runs: Bytes of each piece: one of what the largest plan needs, :attr:`pool_bytes` of a family that captured
                it alone, or several that :func:`choose_runs` found.
            output_bytes: :attr:`output_bytes` of such a family.
        """
        with self._exclusive("a reservation"), self.device.on_stream(self._stream):
            self.device.release_cached()
            self._outputs.reserve(output_bytes)
            self._pool.reserve(runs)

    @contextmanager
    def tracing(self) -> Iterator[list[tuple[int, int]]]:
        """Note what captures inside allocate from the pool: the events of an :class:`AllocationTrace`.

        Whole at the end. Empty where torch's memory history, which it is read from on CUDA, is switched on already.
        """
        with self._pool.tracing() as events:
            yield events

    def window(self) -> AbstractContextManager[None]:
        """Wrap a batch of captures in one window, so that garbage is collected once and not once a plan."""
        return capture_window()

    def capture(
        self,
        fn: Callable[[], Tree],
        *,
        label: str = "",
        breaks: bool = True,
        warmup: int = 1,
        state: Sequence[torch.Tensor] = (),
        outputs: OutputPolicy = "borrow",
        on_hazard: OnHazard | None = None,
        version: Callable[[], object] | None = None,
        compiler: Callable[[Callable[[], None]], Callable[[], Tree]] | None = None,
    ) -> Plan:
        """Capture ``fn``.

        On CUDA this restarts torch's peak memory statistics of the device (``torch.cuda.max_memory_allocated``), which
        the plan's own peak is read from.

        Args:
            fn: Reads its inputs from tensors that stay where they are; returns a tree of tensors and constants.
            label: Shown in reports and errors.
            breaks: Whether marked calls run eagerly between segments (True) or are recorded like everything else.
            warmup: Eager runs on the capture stream before the capture, at least one: libraries set themselves up in
                them, and the outputs' shapes are learnt.
            state: Tensors that ``fn`` updates in place; they hold their old values after the capture.
            outputs: See :attr:`Plan.outputs`.
            on_hazard: After the warm-up, run once more under watch, and if something is found that a replay cannot
                repeat: list all of it in one error ("raise"), turn the smallest module or function around each into a
                break ("break"), or warn ("warn"). None: no such run; the first one met is refused while capturing.
            version: Called now and at every replay, which raises when the value differs: for state that is not on
                modules, such as the number of the adapter whose weights were folded in.
            compiler: Called after the warm-up with what puts state back; gives what is captured in the place of ``fn``.

        Raises:
            HazardError: see ``on_hazard``.
            CaptureError: nothing was captured, and pool, random generators, streams and collector are as before. An
                exception of ``fn``'s own arrives unchanged, with the same effect.
            RankMismatchError: the ranks of the family's group do not capture the same, or one of them failed.
        """
        _check_options(outputs, on_hazard, warmup)
        started = time.perf_counter()
        options = f"{label or 'a plan'} (breaks={breaks}, warmup={warmup}, on_hazard={on_hazard})"
        with (
            self._exclusive("a capture"),
            nullcontext() if self.ranks is None else self.ranks.capturing(options),
            capture_window(),
            self.device.on_stream(self._stream),
            _autocast_uncached(),
        ):
            self._check_usable()
            token = None if version is None else version()
            self._begin_replay()
            with restored(self.device, state) as restore, MadeBreaks() as made:
                mode = ExecMode.current(self.device.torch_device.type).of_thread()
                warmed = warm_up(self.device, fn, made, restore, breaks=breaks, runs=warmup, on_hazard=on_hazard)
                places, (constants, notes, own) = self._outputs.place(warmed.outputs), warmed[1:]
                del warmed
                captured, compile_sec = _compiled(fn, compiler, restore)
                if self.ranks is not None:
                    self.ranks.check_warm_up()
                before = (self._pool.reserved_bytes, self.device.driver_bytes())
                builder = self._build(captured, breaks, places, constants)
            cost = self._cost(builder, *before, started, compile_sec)
            steps, pins = builder.hand_over()
            fingerprint = Fingerprint(fn, pins, self._index, own, version, token)
            plan = Plan(self, label, steps, pins, places, mode, outputs, cost, notes, fingerprint)
            if self.ranks is not None:
                self.ranks.check_structure(plan)
            self._plans.append(plan)
        return plan

    def _cost(
        self, builder: CaptureBuilder, pool_before: int, driver_before: int | None, started: float, compile_sec: float
    ) -> CaptureCost:  # fmt: skip
        driver_after = self.device.driver_bytes()
        return CaptureCost(
            pool_peak_bytes=builder.pool_peak_bytes,
            pool_growth_bytes=self._pool.reserved_bytes - pool_before,
            driver_bytes=None if driver_after is None or driver_before is None else driver_after - driver_before,
            capture_sec=time.perf_counter() - started,
            compile_sec=compile_sec,
        )

    def _check_usable(self) -> None:
        self.device.check_usable()
        if self._pool.broken is not None:
            raise CaptureUnavailableError(
                f"this family can capture nothing more: CUDA invalidated an earlier capture ({self._pool.broken}) and "
                "its pool was lost; the plans it holds still replay, capture others in a new family"
            )

    def _build(
        self, fn: Callable[[], Tree], breaks: bool, places: Tree, constants: Sequence[Any]
    ) -> CaptureBuilder:  # fmt: skip
        self.device.synchronize()
        builder = CaptureBuilder(self.device, self._pool, self._stream, breaks, constants)
        active.builder = builder
        try:
            builder.build(fn, places)
            active.builder = None
            self._check_leaks(builder)
        except BaseException:
            active.builder = None
            self._parked += builder.drop()
            self.device.after_failure()
            raise
        return builder

    def _check_leaks(self, builder: CaptureBuilder) -> None:
        """At the end of a capture nothing in the pool may be live: every replay overwrites it."""
        self.device.synchronize()
        left = builder.new_blocks
        if left:
            gc.collect()
            with between_walks():
                left = builder.new_blocks
        if left:
            holders = find_holders(self._pool, left) or [f"{len(left)} blocks whose holder Python cannot see"]
            raise PoolLeakError(
                f"{sum(b.nbytes for b in left)} bytes of the pool are still in use after the capture, and every replay "
                f"will overwrite them: {'; '.join(holders)}. Create such state before the capture (a warm-up call does)"
                ", or drop it when the captured function returns"
            )

    def _begin_replay(self) -> None:
        self._last_plan = None
        self._last_stream = self.device.begin_replay(self._pool, self._last_stream)
        if self._lent:
            self._poison_lent()

    def _poison_lent(self) -> None:
        for tensor in self._lent:
            bytes_of = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            bytes_of.set_(tensor.untyped_storage()).fill_(0xFF)
        self._lent = []

    def begin_replay(self, plan: Plan) -> None:
        """Of a turn that was taken: the plan is checked, and comes behind the last replay."""
        if self.ranks is None:
            plan.check_first()
        else:
            self.ranks.check_replay(plan)
        self._begin_replay()

    def end_replay(self, plan: Plan) -> None:
        """The replay succeeded: the outputs are the plan's, and valid."""
        self._last_plan = plan

    def check_not_recording(self, plan: Plan) -> None:
        """Raises CaptureError inside a captured function, where a replay would be recorded."""
        if active.builder is not None and active.builder.is_recording:
            raise CaptureError(f"{plan.label or 'a plan'} is replayed inside a captured function; call it in a break")

    def _exclusive(self, what: str) -> AbstractContextManager[None]:
        """One replay, capture or close at a time; other threads wait, a break of this family is refused."""
        return self.turns.turn(what)

    def lend(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill these with 0xFF bytes when the next replay begins: nobody may read them any longer."""
        self._lent = list(tensors)

    def is_last(self, plan: Plan) -> bool:
        """Whether the shared output buffer holds this plan's outputs."""
        return self._last_plan is plan

    def park(self, plan: Plan, segments: Sequence[Segment]) -> None:
        """Take over a closed plan's graphs until the family closes; what they read may go."""
        for segment in segments:
            segment.retire()
        self._parked += segments
        self._index.clear()
        if plan in self._plans:
            self._plans.remove(plan)

    @contextmanager
    def watching(self, watcher: BreakWatcher) -> Iterator[None]:
        """Show ``watcher`` the tensors of every break that is replayed inside, before it runs and after."""
        self.watcher = watcher
        try:
            yield
        finally:
            self.watcher = None

    @contextmanager
    def annotating(self, scope: StepScope) -> Iterator[None]:
        """Run each step that is replayed inside within ``scope(name)``, "segment 0" or "break attend": for tracers."""
        self.step_scope = scope
        try:
            yield
        finally:
            self.step_scope = None

    def poison(self) -> int:
        """Fill the pool's free blocks with 0xFF bytes; a replay must not notice. Returns the bytes filled."""
        with self._exclusive("poisoning"):
            return self._pool.poison()

    def invalidate(self) -> None:
        """Close all plans, because weights were moved or replaced; the family can capture them again.

        A later replay of one raises :class:`StalePlanError`. Their graphs keep driver memory until the family closes.
        """
        with self._exclusive("invalidating"):
            self.device.synchronize()
            for plan in list(self._plans):
                plan.invalidate()

    def close(self) -> None:
        """Destroy all plans, then the pool. Safe to call twice."""
        if self.turns.is_closed:
            return
        with self._exclusive("closing"):
            self.device.synchronize()
            for plan in list(self._plans):
                plan.close()
            self.turns.is_closed = True
            for segment in self._parked:
                segment.close()
            self._parked = []
            self._last_plan, self._lent = None, []
            self._outputs.close()
            self._pool.close()
            self.device.give_stream(self._stream)

    def __enter__(self) -> PlanFamily:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _compiled(
    fn: Callable[[], Tree],
    compiler: Callable[[Callable[[], None]], Callable[[], Tree]] | None,
    restore: Callable[[], None],
) -> tuple[Callable[[], Tree], float]:
    """What is captured, and the seconds that it took to make it."""
    if compiler is None:
        return fn, 0.0
    begun = time.perf_counter()
    captured = compiler(restore)
    restore()
    return captured, time.perf_counter() - begun


def _check_options(outputs: str, on_hazard: str | None, warmup: int) -> None:
    if outputs not in ("borrow", "copy", "poison"):
        raise ConfigError(f'expected outputs="borrow", "copy" or "poison", got {outputs!r}')
    if on_hazard not in (None, "raise", "break", "warn"):
        raise ConfigError(f'expected on_hazard="raise", "break", "warn" or None, got {on_hazard!r}')
    if warmup < 1:
        raise ConfigError(f"expected warmup >= 1, got {warmup}; the first run sets libraries up outside the pool")
    if active.builder is not None:
        raise CaptureError("this thread is already capturing; capture one plan after the other")


@contextmanager
def _autocast_uncached() -> Iterator[None]:
    """The autocast weight cache would keep pool tensors alive after the capture."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
