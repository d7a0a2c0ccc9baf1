"""``torch.compile`` of the whole forward, split at the marked calls; each piece is compiled, then captured.

The FX graph is made once for all buckets, for any number of rows. Segments, breaks, boundaries, pins and plans are
those of the breakable backend: what is captured is the split graph in the place of the forward.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from breakgraph.backends.base import PlanBackend, Tree
from breakgraph.backends.tc_piecewise_graph import Compile, PieceGraph
from breakgraph.errors import CaptureError, UntraceableError
from breakgraph.graph.opaque_call import Slot
from breakgraph.graph.refusals import innermost_line
from breakgraph.graph.tracing import CallLog, traced_results, whole_trace
from breakgraph.graph.tree import tree_map

if TYPE_CHECKING:
    from breakgraph.backends.base import CompileForward
    from breakgraph.graph import PlanFamily, ShapeKey

Compiler = Literal["eager", "inductor"]
_MAX_VARIANTS = 1024
"""Traces of one backend, buckets whose shapes share none."""
_numbers = itertools.count()


class TcPiecewiseBackend(PlanBackend):
    """Traced as a whole; the pieces between marked calls run operator by operator, so its bits are those of eager."""

    name = "tc_piecewise"
    records_breaks = False
    compiles = True
    compiler: ClassVar[Compiler] = "eager"

    def __init__(self, family: PlanFamily) -> None:
        super().__init__(family)
        self._tracer = Tracer(self.compiler)

    def _compiled(self, key: ShapeKey, forward: Callable[[], Tree], restore: Callable[[], None]) -> Callable[[], Tree]:
        return self._tracer.compiled(forward, self.family.device.torch_device.type, restore)

    def _compiler(self, key: ShapeKey, forward: Callable[[], Tree]) -> CompileForward:
        return partial(self._compiled, key, forward)


class TcPiecewiseInductorBackend(TcPiecewiseBackend):
    """The same with Inductor's kernels in the pieces, which round differently."""

    name = "tc_piecewise_inductor"
    compiler = "inductor"

    def __init__(self, family: PlanFamily) -> None:
        super().__init__(family)
        self._uncaptured: dict[ShapeKey, Callable[[], Tree]] = {}

    def _compiled(self, key: ShapeKey, forward: Callable[[], Tree], restore: Callable[[], None]) -> Callable[[], Tree]:
        made = super()._compiled(key, forward, restore)
        self._uncaptured[key] = made
        return made

    def reference(self, key: ShapeKey, forward: Callable[[], Tree]) -> Callable[[], Tree]:
        return self._uncaptured.get(key, forward)

    def _drop(self, key: ShapeKey) -> None:
        self._uncaptured.pop(key, None)


class Tracer:
    """The compiled code of one backend. Dynamo keeps what it compiled with a code object: this has one of its own."""

    def __init__(self, compiler: Compiler) -> None:
        self._compile_piece: Compile | None = _inductor if compiler == "inductor" else None
        self._last: _Run | None = None
        self._log: CallLog | None = None
        self._compiled: Any = None

    def compiled(
        self, forward: Callable[[], Tree], device_type: str, restore: Callable[[], None]
    ) -> Callable[[], Tree]:  # fmt: skip
        """What does the same as ``forward``, on the same tensors, in pieces.

        Runs the forward once as it is and once in pieces, which compiles them and loads their kernels; ``restore`` is
        called between.

        Raises:
            UntraceableError: Dynamo cannot trace it, or traces nothing at all.
            CaptureError: a piece cannot be compiled.
        """
        with whole_trace(), _dynamo_options():
            self._log = CallLog(device_type)
            try:
                with self._log:
                    forward()
                restore()
                traced_results(self._log.calls)
                result = self._run_traced(forward)
                run = self._last
            finally:
                self._last = self._log = None
        return forward if run is None else run.with_results(result)  # None: it holds no operator at all

    def _run_traced(self, forward: Callable[[], Tree]) -> Tree:
        """Run it as Dynamo traced it: now, or at an earlier call."""
        from torch._dynamo.exc import TorchDynamoException

        if self._compiled is None:
            self._compiled = torch.compile(_own_call(), backend=self._backend, fullgraph=True, dynamic=True)
        try:
            is_traced, result = self._compiled(forward)
        except TorchDynamoException as error:
            raise _explained(error) from error
        except RuntimeError as error:
            if self._last is not None or isinstance(error, CaptureError):
                raise
            self._compiled = None  # Dynamo skips that code from now on
            raise _untraced(str(error).strip().split("\n")[0]) from error
        if not is_traced:
            self._compiled = None
            raise _untraced("it ran as plain Python")
        return result

    def _backend(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        pieces = PieceGraph(graph, self._compile_piece)

        def run(*inputs: Any) -> Any:
            assert self._log is not None, "the graph is called outside of a trace"
            self._last = _Run(pieces, inputs, self._log)
            return self._last()

        return run


def _call(forward: Callable[[], Tree]) -> tuple[bool, Tree]:
    return torch.compiler.is_dynamo_compiling(), forward()  # the former is true for good in what Dynamo makes of it


def _own_call() -> Any:
    code = _call.__code__.replace(co_name=f"_call_{next(_numbers)}")
    return types.FunctionType(code, {"__builtins__": builtins, "__name__": __name__, "torch": torch}, "_call")


class _Run:
    """One call of a split graph: on these inputs, with these opaque calls."""

    def __init__(self, pieces: PieceGraph, inputs: tuple[Any, ...], log: CallLog) -> None:
        self._pieces = pieces
        self._inputs = inputs
        self._log = log
        self._outputs: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        self._outputs = tuple(self._pieces.run(self._inputs, self._log.calls))
        return self._outputs

    def with_results(self, result: Tree) -> Callable[[], Tree]:
        """The same call, giving a tree like ``result``, which was made of this one's outputs."""
        numbers = {id(value): i for i, value in enumerate(self._outputs) if isinstance(value, torch.Tensor)}
        # A tensor that the graph did not give was there before: Dynamo took it from where it lies.
        tree = tree_map(lambda leaf, _: Slot(numbers[id(leaf)]) if id(leaf) in numbers else leaf, result)
        self._outputs = ()
        pieces, inputs, calls = self._pieces, self._inputs, self._log.calls

        def run() -> Tree:
            outputs = pieces.run(inputs, calls)
            return tree_map(lambda leaf, _: outputs[leaf.index] if isinstance(leaf, Slot) else leaf, tree)

        return run


def _inductor(piece: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    with torch.no_grad(), warnings.catch_warnings():  # no replay has gradients
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's about itself
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(piece, examples)

    def run(*args: Any) -> Any:
        with torch.no_grad():
            return compiled(*args)

    return run


@contextlib.contextmanager
def _dynamo_options() -> Iterator[None]:
    """Sizes that happen to be equal stay apart, floats are constants, and no trace is given up for there being many."""
    import torch._dynamo
    import torch.fx.experimental._config as shapes

    options = {
        "recompile_limit": _MAX_VARIANTS,
        "accumulated_recompile_limit": 16 * _MAX_VARIANTS,
        "fail_on_recompile_limit_hit": True,
        "specialize_float": True,
        "suppress_errors": False,
    }
    with torch._dynamo.config.patch(options), shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


def _explained(error: Exception) -> CaptureError:
    """An error of Dynamo's in words of ours."""
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception if hasattr(error, "inner_exception") else error
        if isinstance(inner, CaptureError):
            return inner
        first = str(inner).strip().split("\n")[0]
        return CaptureError(
            f"a piece of the forward cannot be compiled: {type(inner).__name__}: {first}; use backend 'breakable', "
            "which compiles nothing, or 'tc_piecewise', which runs the pieces operator by operator"
        )
    return UntraceableError(
        f"torch.compile cannot trace the forward as a whole: {_reason(error)} ({_source_line(error)}); use backend "
        "'breakable', which needs no tracing, or mark the call with @eager_on_graph"
    )


def _untraced(why: str) -> UntraceableError:
    """The error where Dynamo made nothing of the forward, for reasons of its own."""
    return UntraceableError(
        f"torch.compile traced nothing of the forward: {why.rstrip('.')}; it is switched off where "
        "TORCHDYNAMO_DISABLE=1 or torch.compiler.set_stance() says so: take that back, or use backend "
        "'breakable', which needs no tracing"
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().split("\n")]
    why = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return ": ".join([lines[0].rstrip(".:"), *why[:1]]).rstrip(".")


def _source_line(error: Exception) -> str:
    """``file:line in function`` of the innermost frame of the user's code that Dynamo was in."""
    frames = [(frame.filename, frame.lineno, frame.name) for frame in getattr(error, "real_stack", None) or ()]
    frames = frames or re.findall(r'File "(.+?)", line (\d+), in (\S+)', str(error))
    return innermost_line(frames)
