"""The FX graph of a whole forward, split at the calls that Dynamo did not look into, and how its pieces run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from breakgraph.errors import CaptureError
from breakgraph.graph.compiled import run_piece
from breakgraph.graph.opaque_call import OpaqueCall
from breakgraph.graph.refusals import traced_code
from breakgraph.graph.tracing import is_opaque

Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""From a piece and fake values of its inputs to what runs in its place."""

_VALUE = "example_value"


class PieceGraph:
    """Pieces and opaque calls in the order of the forward.

    Args:
        whole: What Dynamo made of the forward; taken over.
        compile_piece: None: pieces run operator by operator.
    """

    def __init__(self, whole: fx.GraphModule, compile_piece: Compile | None) -> None:
        _spell_sizes_out(whole.graph)
        parts = _parts(whole.graph)
        # Imported late: it is slow, and only this backend needs it.
        from torch.fx.passes.split_module import split_module

        self._top = split_module(whole, None, lambda node: parts[node], keep_original_order=True)  # type: ignore[arg-type]
        self._opaque: dict[str, int] = {}
        self._pieces: dict[str, Callable[..., Any]] = {}
        for node in self._top.graph.nodes:
            if node.op == "call_module":
                self._add(node.target, getattr(self._top, node.target), compile_piece)

    def _add(self, name: str, module: fx.GraphModule, compile_piece: Compile | None) -> None:
        if any(is_opaque(node.target) for node in module.graph.nodes):
            self._opaque[name] = len(self._opaque)
        elif compile_piece is None or not _computes(module.graph):
            self._pieces[name] = lambda *args: _PieceRun(module).run(*args)
        else:
            compiled = compile_piece(module, _examples(module.graph))
            self._pieces[name] = lambda *args: run_piece(compiled, args)

    def run(self, inputs: Sequence[Any], calls: Sequence[OpaqueCall]) -> Any:
        """The graph's outputs.

        Args:
            inputs: As Dynamo orders them.
            calls: The opaque calls, in the forward's order.

        Raises:
            CaptureError: not as many as the trace met.
        """
        if len(calls) != len(self._opaque):
            raise CaptureError(
                f"the forward made {len(calls)} marked calls when it ran and {len(self._opaque)} when it was traced; a "
                "captured function must do the same at every call"
            )
        return _Run(self._top, self._pieces, self._opaque, calls).run(*inputs)


class _Run(fx.Interpreter):
    """Lets go of each value after its last use, as the forward does."""

    def __init__(
        self,
        top: fx.GraphModule,
        pieces: dict[str, Callable[..., Any]],
        opaque: dict[str, int],
        calls: Sequence[OpaqueCall],
    ) -> None:
        super().__init__(top)
        self.extra_traceback = False
        self._pieces_by_name = pieces
        self._opaque = opaque
        self._calls = calls

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self._pieces_by_name:
            return self._pieces_by_name[target](*args)
        return _OpaqueRun(self.fetch_attr(target), self._calls[self._opaque[target]]).run(*args)


class _PieceRun(fx.Interpreter):
    """Operator by operator, each with the line that it comes from."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        traced_code.stack = n.stack_trace
        try:
            return super().run_node(n)
        finally:
            traced_code.stack = None


class _OpaqueRun(fx.Interpreter):
    """The part of the graph that holds one opaque call and what is taken out of its result."""

    def __init__(self, module: fx.GraphModule, call: OpaqueCall) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._call = call

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call.run(args[3]) if is_opaque(target) else target(*args, **kwargs)


def _parts(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of the part that each node belongs to: a new one for every opaque call, and another behind it."""
    parts: dict[fx.Node, int] = {}
    part = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_opaque(node.target):
            parts[node] = part + 1
            part += 2
        elif node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_opaque(node.args[0].target):
            parts[node] = parts[node.args[0]]
        else:
            parts[node] = part
    return parts


def _spell_sizes_out(graph: fx.Graph) -> None:
    """Numbers in the place of ``torch.Size``: pieces hand on tensors and numbers only."""
    for node in list(graph.nodes):
        sizes = node.meta.get(_VALUE)
        if node.op in ("placeholder", "output") or not isinstance(sizes, torch.Size):
            continue
        with graph.inserting_after(node):
            spelled = [size if isinstance(size, int) else _item(graph, node, i, size) for i, size in enumerate(sizes)]
        for user in list(node.users):
            if user in spelled:
                continue
            index = user.args[1] if user.target is operator.getitem else None
            if isinstance(index, int) and isinstance(spelled[index], fx.Node):
                user.replace_all_uses_with(spelled[index])
                graph.erase_node(user)
                continue
            user.args = _replaced(user.args, node, tuple(spelled))
            user.kwargs = _replaced(user.kwargs, node, tuple(spelled))
        if not node.users:
            graph.erase_node(node)


def _replaced(arguments: Any, node: fx.Node, value: tuple[Any, ...]) -> Any:
    return fx.node.map_arg(arguments, lambda other: value if other is node else other)


def _item(graph: fx.Graph, node: fx.Node, index: int, value: Any) -> fx.Node:
    made = graph.call_function(operator.getitem, (node, index))
    made.meta[_VALUE] = value
    return made


def _examples(graph: fx.Graph) -> list[Any]:
    """Fake values of a piece's inputs."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    unknown = [node.name for node in inputs if _VALUE not in node.meta]
    if unknown:
        raise CaptureError(
            f"a piece of the forward takes {', '.join(unknown)}, which is no tensor and no number: a context is "
            "entered in the forward and left behind a marked call; enter it around the whole forward, or use backend "
            "'breakable'"
        )
    return [node.meta[_VALUE] for node in inputs]


def _computes(graph: fx.Graph) -> bool:
    """Whether there is anything in it for a compiler."""
    return any(
        node.op not in ("placeholder", "output") and isinstance(node.meta.get(_VALUE), torch.Tensor)
        for node in graph.nodes
    )
