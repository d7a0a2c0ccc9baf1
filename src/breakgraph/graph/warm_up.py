"""The eager runs before a capture: libraries set themselves up, hazards are found, and breaks are made around them."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from breakgraph.errors import CaptureError, HazardWarning
from breakgraph.graph.device import Device
from breakgraph.graph.eager_break import BreakSpec, EagerBreak, active, is_break, run_break, run_plain
from breakgraph.graph.hazard_scan import HazardScan, ScanResult, Site, forward_line, paths_of
from breakgraph.graph.hazards import Hazard, OnHazard
from breakgraph.graph.pretence import as_if_capturing
from breakgraph.graph.python_state import StateWatch
from breakgraph.graph.side_effects import Attribute, AttributeWatch, Reachable, named, reachable
from breakgraph.graph.tree import Tree


class WarmUp:
    """The warm-up of this thread. Marked calls and declared constants reach it through ``eager_break.active``.

    Args:
        breaks: Whether marked calls will be breaks in the capture.
    """

    def __init__(self, device: Device, breaks: bool) -> None:
        self.constants: list[Any] = []
        self._device = device
        self._breaks = breaks
        self._in_break = False
        self._scan: HazardScan | None = None

    def run(self, fn: Callable[[], Tree], scan: HazardScan | None = None) -> Tree:
        """One eager run.

        Raises:
            CaptureError: a declared constant differs from that of the run before.
        """
        before, self.constants = self.constants, []
        outer, active.warm_up = active.warm_up, self
        self._scan = scan
        try:
            if scan is None:
                result = fn()
            else:
                with scan, as_if_capturing(breaks=self._breaks):
                    result = fn()
        finally:
            active.warm_up, self._scan = outer, None
        for old, new in zip(before, self.constants, strict=False):
            if old != new:
                raise CaptureError(
                    f"breakgraph.constant() gave {old!r} in one warm-up run and {new!r} in the next, so it is no "
                    "constant; read it in an eager break"
                )
        return result

    def call_break(
        self, spec: BreakSpec, fn: Callable[..., Tree], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tree:  # fmt: skip
        """A marked call while this thread warms up: runs; nothing in it is a hazard."""
        if not self._breaks or self._in_break:
            return run_plain(spec, fn, args, kwargs)
        self._in_break = True
        try:
            if self._scan is None:
                return run_break(spec, fn, args, kwargs)
            return self._scan.run_break(lambda: run_break(spec, fn, args, kwargs))
        finally:
            self._in_break = False

    def constant(self, value: Any, read: Callable[[], Any]) -> Any:
        """A declared constant: read now, given again in the capture."""
        if self._in_break:
            return read()
        if self._scan is None:
            found = read()
        else:
            with self._scan.silence():
                found = read()
        if isinstance(value, torch.Tensor):
            self.constants.append(found)
        return found


class MadeBreaks:
    """Breaks that ``on_hazard="break"`` put around hazards, for as long as the capture takes.

    Owns: marks on modules and replaced global functions. Closed by: the end of the capture.
    """

    def __init__(self) -> None:
        self._forwards: list[tuple[torch.nn.Module, object]] = []
        self._functions: list[tuple[dict[str, Any], str, types.FunctionType]] = []

    def make(self, found: ScanResult) -> list[str]:
        """Put a break around each blocking hazard; returns why that was not possible for some."""
        refused = []
        now: set[int] = set()
        for hazard, site in zip(found.report.hazards, found.sites, strict=True):
            if hazard.blocks:
                obstacle = self._make_one(hazard, site, found.obstacles, now)
                if obstacle is not None:
                    refused.append(obstacle)
        return refused

    def _make_one(
        self, hazard: Hazard, site: Site, obstacles: dict[int, str], now: set[int]
    ) -> str | None:  # fmt: skip
        reasons = []
        for call in reversed(site.modules):
            module = call.module
            if id(module) in now:
                return None  # made for another hazard
            if is_break(module.forward):
                reasons.append(f"{call.path}: it is a break, and this is outside of its forward()")
                continue
            if id(module) not in obstacles:
                now.add(id(module))
                self._forwards.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = EagerBreak(module.forward, name=call.path, reason=hazard.reason)
                return None
            reasons.append(f"{call.path}: {obstacles[id(module)]}")
        if reasons:
            return "; ".join(reasons)
        for function in reversed(site.functions):
            namespace, name = function.__globals__, function.__name__
            if isinstance(namespace.get(name), EagerBreak):
                return None
            namespace[name] = EagerBreak(function, reason=hazard.reason)
            self._functions.append((namespace, name, function))
            return None
        inside = f"{site.function_name}() is no global function" if site.function_name else "no function is around it"
        return f"{hazard.what} is in no module, and {inside}; decorate the function around it with @eager_on_graph"

    def remove(self) -> None:
        """Give modules and namespaces what they had; captured plans keep their breaks."""
        for module, forward in reversed(self._forwards):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
        self._forwards = []
        for namespace, name, function in reversed(self._functions):
            namespace[name] = function
        self._functions = []

    def __enter__(self) -> MadeBreaks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Warmed(NamedTuple):
    """What the warm-up leaves for the capture: what the function returned, declared constants, notes of the scan, and
    what the first call set on modules (None: nobody looked)."""

    outputs: Tree
    constants: list[Any]
    notes: tuple[str, ...]
    own: frozenset[Attribute] | None = None


def warm_up(
    device: Device,
    fn: Callable[[], Tree],
    made: MadeBreaks,
    restore: Callable[[], None],
    *,
    breaks: bool,
    runs: int,
    on_hazard: OnHazard | None,
) -> Warmed:
    """Run ``fn`` eagerly ``runs`` times, and once more under watch unless ``on_hazard`` is None; again where that
    showed modules which nobody was seen to hold, and after breaks were made.

    Args:
        made: Where breaks are kept that ``on_hazard="break"`` makes.
        restore: Puts registered state and generators back; called after the runs.

    Raises:
        HazardError: there are hazards, and ``on_hazard`` is "raise", or is "break" and no break is possible.
    """
    warm = WarmUp(device, breaks)
    roots, holders = Reachable({}, []) if on_hazard is None else reachable(fn)
    attributes = AttributeWatch(roots.values(), holders)
    state = StateWatch(fn if on_hazard is not None else None)
    outputs: Tree = None
    for _ in range(runs):
        outputs = warm.run(fn)
    restore()
    if on_hazard is None:
        return Warmed(outputs, warm.constants, ())
    own = attributes.changed()
    state.suspect(state.changed())
    first_use = _first_use_notes(own, roots)
    is_known = is_sure = False
    while True:
        scan = HazardScan(device, roots, attributes, state)
        outputs = warm.run(fn, scan)
        restore()
        found = scan.result()
        strangers = [] if is_known else scan.strangers()
        if strangers:
            # Held by objects that are not looked into: from now on they are watched like the others.
            roots, is_known = named([*roots.values(), *strangers]), True
            attributes.add(strangers)
            state.add(strangers)
            continue
        if not (found.is_sure or is_sure):
            is_sure = True  # once is enough: what changed is watched around breaks from now on
            continue
        if not found.report.blocking or on_hazard == "warn":
            break
        obstacles = made.make(found) if on_hazard == "break" else []
        if on_hazard == "raise" or obstacles:
            raise found.report.error(obstacles)
    state.forget()
    if found.report.blocking:
        warnings.warn(str(found.report), HazardWarning, stacklevel=2)
    return Warmed(outputs, warm.constants, (*first_use, *map(str, found.report.notes)), frozenset(own))


def _first_use_notes(own: Iterable[Attribute], roots: dict[str, torch.nn.Module]) -> tuple[str, ...]:
    """What the first run left on modules: harmless, since it lies outside the pool and is there by now."""
    paths = paths_of(roots)
    notes = []
    for attribute in own:
        owner, name = attribute.owner, attribute.name
        path = paths.get(id(owner), "")
        what = f"{path or type(owner).__name__}.{name}"
        why = "was set by the first call, and captures use what it holds"
        notes.append(str(Hazard("first-use state", what, why, path, forward_line(owner), "", False)))
    return tuple(notes)
