"""One eager run under watch: which operators, calls and attribute changes a replay could not repeat, and where."""

from __future__ import annotations

import inspect
import itertools
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.graph.computed_weights import computed_weight
from breakgraph.graph.device import Device
from breakgraph.graph.effects import allocates_only, tensors_in
from breakgraph.graph.hazards import Hazard, HazardReport
from breakgraph.graph.live import Live
from breakgraph.graph.op_facts import OpTable, parts_of
from breakgraph.graph.python_state import Change, StateWatch, one_of_a_kind
from breakgraph.graph.refusals import WAY_OUT, Fault, form_fault, is_user_file, op_fault, source_line
from breakgraph.graph.seeds import FAULT as SEEDED
from breakgraph.graph.seeds import WAY_OUT as SEED_WAY_OUT
from breakgraph.graph.seeds import SeedWatch
from breakgraph.graph.side_effects import Attribute, AttributeWatch, is_a, outermost
from breakgraph.graph.tree import is_constant, is_scattered, is_transformed, layout_of, tree_leaves

_WARM_UP = str(Path(__file__).with_name("warm_up.py"))  # whose frames are around the captured function
_OWN_PACKAGE = str(Path(__file__).parent.parent)
_GENERATOR_WAY_OUT = "use the device's default generator (torch.manual_seed), or draw in an eager break"
_HOST_RANDOM_WAY_OUT = "draw on the device, or in an eager break"
_SIDE_EFFECT_WAY_OUT = (
    "change it in an eager break or outside the captured function, keep it in a tensor, or, if no captured code "
    'depends on it, capture with on_hazard="warn"'
)
_UNSEEN_STATE = Hazard(
    "Python state", "Python state", "lies behind so many objects that not all of it is looked at; verify shows whether "
    "calls change it", "", "unknown source line", "", blocks=False,
)  # fmt: skip


@dataclass(slots=True)
class ModuleCall:
    """One module on the stack of running ones."""

    module: torch.nn.Module
    path: str


@dataclass(slots=True)
class Site:
    """Where a hazard was met: the modules around it and the functions around it, innermost last."""

    modules: tuple[ModuleCall, ...]
    functions: tuple[types.FunctionType, ...] = ()
    function_name: str = ""


@dataclass(slots=True)
class ScanResult:
    """What a scan found, where, and which modules cannot be breaks.

    Attributes:
        is_sure: False where a change of Python state may have been made by a break: look again.
    """

    report: HazardReport
    sites: list[Site]
    obstacles: dict[int, str] = field(default_factory=dict)
    is_sure: bool = True


class HazardScan:
    """Watches one run. Use as a context manager around it, then :meth:`result`.

    Args:
        device: Tells device tensors from host tensors.
        roots: Names of the modules that the function uses, for paths.
        attributes: Compared at the end of the run.
        state: The same, of what is no attribute of a module.
    """

    def __init__(
        self, device: Device, roots: dict[str, torch.nn.Module], attributes: AttributeWatch, state: StateWatch
    ) -> None:  # fmt: skip
        self.device = device
        self.quiet = 0
        self.main_stream = device.current_stream()
        self._attributes = attributes
        self._state = state
        self._thread = threading.get_ident()
        self._names = paths_of(roots)
        self._stack: list[ModuleCall] = []
        self._calls: dict[int, tuple[ModuleCall, ...]] = {}
        self._strangers: list[torch.nn.Module] = []
        self._in_break_only: set[int] = set()
        self._obstacles: dict[int, str] = {}
        self._found: list[tuple[Hazard, Site]] = []
        self._guard = device.host_guard(self._note_call)
        self._scope = ExitStack()
        self._host_random: Any = None
        self._seeds = SeedWatch(())
        self._is_seeded = False

    def __enter__(self) -> HazardScan:
        self._scope.callback(register_module_forward_pre_hook(self._enter).remove)
        self._scope.callback(register_module_forward_hook(self._leave, with_kwargs=True, always_call=True).remove)
        self._guard.enabled = True
        self._scope.enter_context(self._guard)
        self._scope.enter_context(_Operators(self))
        self._attributes.renew()
        self._state.renew()
        own = [g for g in self.device.default_generators() if g.device == self.device.torch_device]
        self._seeds = SeedWatch(own)
        self._host_random = self._host_random_state()
        return self

    def __exit__(self, *exc: object) -> None:
        self._scope.close()
        self.check_seeds("unknown source line")
        # A seed of torch's sets the generator on the host too.
        compared = slice(2) if self._is_seeded else slice(None)
        if self._host_random_state()[compared] != self._host_random[compared]:
            why = "is drawn from on the host, and a replay repeats the captured numbers"
            where = "unknown source line"
            self._add(Hazard("unregistered generator", "a random generator", why, "", where, _HOST_RANDOM_WAY_OUT))

    def check_seeds(self, where: str = "") -> None:
        """Note it if the code seeded a generator since the last time that this was asked."""
        if self._seeds.is_seeded:
            self._seeds = SeedWatch(())  # once is enough
            self._is_seeded = True
            path = self._stack[-1].path if self._stack else ""
            hazard = Hazard(*SEEDED, path, where or source_line(), SEED_WAY_OUT)
            self._add(hazard, Site(tuple(self._stack), *_functions_on_the_stack()))

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Note nothing inside: a break, or a call that has been noted as a whole."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def run_break(self, call: Callable[[], Any]) -> Any:
        """Run an eager break: nothing in it is a hazard."""
        self.check_seeds()
        with self.silence():
            self._guard.enabled = False
            is_untouched = self._host_random_state() == self._host_random
            try:
                return self._attributes.allowing(lambda: self._state.allowing(call))
            finally:
                self._guard.enabled = True
                self._seeds.renew()
                if is_untouched:
                    self._host_random = self._host_random_state()

    def result(self) -> ScanResult:
        """What the run showed; call it once the run is over."""
        attributes, changes = self._attributes.changed(), self._state.changed(self._names)
        for attribute in attributes:
            if id(attribute.owner) not in self._in_break_only:
                self._note_side_effect(attribute, changes)
        known = {(id(attribute.owner), attribute.name) for attribute in attributes}
        is_new = (known.isdisjoint(c.way) and self._in_break_only.isdisjoint(map(id, c.around)) for c in changes)
        for change in one_of_a_kind(itertools.compress(changes, is_new)):
            self._note_change(change)
        if self._state.is_cut:
            self._add(_UNSEEN_STATE)
        hazards = tuple(hazard for hazard, _ in self._found)
        is_sure = not self._state.suspect(changes)
        return ScanResult(HazardReport(hazards), [site for _, site in self._found], self._obstacles, is_sure)

    def strangers(self) -> list[torch.nn.Module]:
        """Modules that were called and lie under no root, without those inside of others."""
        return outermost(self._strangers)

    def note(self, fault: Fault, way_out: str = WAY_OUT, blocks: bool = True) -> None:
        """Add a hazard met at this very point of the run."""
        if self.quiet or threading.get_ident() != self._thread:
            return
        functions, name = _functions_on_the_stack()
        path = self._stack[-1].path if self._stack else ""
        hazard = Hazard(*fault, path, source_line(), way_out, blocks)
        self._add(hazard, Site(tuple(self._stack), functions, name))

    def _note_call(self, fault: Fault) -> AbstractContextManager[None]:
        self.note(fault)
        return self.silence()

    def _host_random_state(self) -> Any:
        """Of the generators on the host; where the device is the host, torch's own is one that graphs know."""
        drawn = () if self.device.emulated else bytes(torch.default_generator.get_state().tolist())
        numpy = sys.modules.get("numpy")  # whoever has not imported it draws nothing from it
        drawn_by_numpy = b"" if numpy is None else pickle.dumps(numpy.random.get_state())
        return random.getstate(), drawn_by_numpy, drawn

    def _add(self, hazard: Hazard, site: Site | None = None) -> None:
        if all(hazard != known for known, _ in self._found):
            self._found.append((hazard, site or Site(())))

    def _note_side_effect(self, attribute: Attribute, changes: Sequence[Change]) -> None:
        owner, name = attribute.owner, attribute.name
        path = self._names.get(id(owner), type(owner).__name__)
        told = next((change.told for change in changes if change.way[-1] == (id(owner), name)), "")
        module = path if is_a(owner, torch.nn.Module) else ""
        hazard = _side_effect(f"{path}.{name}", told, module, forward_line(owner))
        computed = computed_weight(owner, name)
        if computed is not None:
            hazard = replace(hazard, why=computed.why, way_out=computed.way_out)
        self._add(hazard, Site(self._calls.get(id(owner), ())))

    def _note_change(self, change: Change) -> None:
        modules = [owner for owner in reversed(change.around) if is_a(owner, torch.nn.Module)]
        path = self._names.get(id(modules[0]), "") if modules else ""
        line = forward_line(modules[0]) if modules else function_line(change.around)
        called = next((calls for module in modules if (calls := self._calls.get(id(module)))), ())
        self._add(_side_effect(change.path, change.told, path, line), Site(called))

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if id(module) not in self._names:
            self._strangers.append(module)
            self._names = paths_of({type(module).__name__: module}) | self._names
        self._stack.append(ModuleCall(module, self._names[id(module)]))
        if self.quiet:
            if id(module) not in self._calls:
                self._in_break_only.add(id(module))
        else:
            self._in_break_only.discard(id(module))
            self._calls.setdefault(id(module), tuple(self._stack))

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        """A hook with keyword arguments, which torch leaves out when the module raises."""
        kwargs, result = rest if len(rest) == 2 else ({}, *rest)
        if threading.get_ident() != self._thread:
            return
        while self._stack and self._stack.pop().module is not module:
            continue  # an inner call whose hooks did not run
        obstacle = _obstacle(args, kwargs, result)
        if obstacle is not None:
            self._obstacles.setdefault(id(module), obstacle)


class _Operators(TorchDispatchMode):
    """Notes what the dispatcher sees."""

    supports_higher_order_operators = True

    def __init__(self, scan: HazardScan) -> None:
        super().__init__()
        self._scan = scan
        self._ops = OpTable(scan.device.torch_device.type)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scan, kwargs = self._scan, kwargs or {}
        given = tensors_in(*args, *kwargs.values())
        fault = form_fault(func, given)
        if fault is not None:
            scan.note(fault)
            with scan.silence():
                return func(*args, **kwargs)
        facts = self._ops[func]
        if facts.is_composite:
            with self:
                return parts_of(func, args, kwargs)
        if not scan.quiet:
            if facts.is_random:
                scan.check_seeds()
            fault = op_fault(func, args) or scan.device.transfer_fault(func, args, kwargs, given)
            if fault is not None:
                scan.note(fault)
            self._note_generator(func, args, kwargs)
            self._note_stream(func)
        return scan.device.from_host(given, func(*args, **kwargs))

    def _note_generator(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        generators = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        if any(generator not in self._scan.device.default_generators() for generator in generators):
            why = "draws from a generator that no graph knows, so that a replay would not advance it"
            self._scan.note(Fault("unregistered generator", f"{func} with a generator", why), _GENERATOR_WAY_OUT)

    def _note_stream(self, func: Any) -> None:
        if func.is_view or allocates_only(func) or self._scan.device.current_stream() == self._scan.main_stream:
            return
        why = "runs on another stream, which is joined at the end of each segment"
        self._scan.note(Fault("side stream", str(func), why), blocks=False)


def paths_of(roots: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Path of each module under the roots, by identity."""
    paths: dict[int, str] = {}
    for root, top in roots.items():
        for name, module in top.named_modules():
            paths.setdefault(id(module), f"{root}.{name}" if name else root)
    return paths


def forward_line(owner: object) -> str:
    """``file:line in function`` of a module's ``forward``."""
    forward = inspect.unwrap(type(owner).forward) if is_a(owner, torch.nn.Module) else None
    code = getattr(forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in forward" if code is not None else "unknown source line"


def function_line(around: Sequence[object]) -> str:
    """``file:line in function`` of the innermost function of the user's among objects."""
    for item in reversed(around):
        function = item.__func__ if is_a(item, types.MethodType) else item
        code = function.__code__ if is_a(function, types.FunctionType) else None
        if code is not None and is_user_file(code.co_filename) and not code.co_filename.startswith(_OWN_PACKAGE):
            return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return "unknown source line"


def _side_effect(what: str, told: str, module: str, line: str) -> Hazard:
    why = f"is changed by every call{f' ({told})' if told else ''}, and a replay runs no Python"
    return Hazard("Python side effect", what, why, module, line, _SIDE_EFFECT_WAY_OUT)


def _obstacle(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> str | None:
    """Why a call cannot be a break; None if it can."""
    for path, leaf in (*tree_leaves(list(args), "argument "), *tree_leaves(kwargs, "argument ")):
        if not isinstance(leaf, torch.Tensor | torch.nn.Module | torch.Size | Live) and not is_constant(leaf):
            return f"{path} is a {type(leaf).__name__}"
    tensors = [t for _, t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if any(map(is_transformed, [*tensors, *(t for _, t in tree_leaves(result) if isinstance(t, torch.Tensor))])):
        return "it is inside of a transform of torch.func"
    given = {t.untyped_storage()._cdata for t in tensors if not is_scattered(t)}
    for path, leaf in tree_leaves(result, "its result"):
        if isinstance(leaf, torch.Tensor):
            if is_scattered(leaf):
                return f"{path} is a {layout_of(leaf)} tensor"
            if leaf.untyped_storage()._cdata in given:
                return f"{path} shares memory with an argument"
        elif isinstance(leaf, bool | int | float | complex):
            return f"{path} is the {type(leaf).__name__} {leaf!r}, which code after it would keep"
        elif not is_constant(leaf):
            return f"{path} is a {type(leaf).__name__}"
    return None


def _functions_on_the_stack() -> tuple[tuple[types.FunctionType, ...], str]:
    """Global functions of the user's that are running, innermost last, and the name of the innermost function."""
    found: list[types.FunctionType] = []
    innermost = ""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _WARM_UP:
        if is_user_file(frame.f_code.co_filename):
            innermost = innermost or frame.f_code.co_name
            candidate = frame.f_globals.get(frame.f_code.co_name)
            if isinstance(candidate, types.FunctionType) and candidate.__code__ is frame.f_code:
                found.append(candidate)
        frame = frame.f_back
    return tuple(reversed(found)), innermost
