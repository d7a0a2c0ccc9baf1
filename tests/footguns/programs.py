"""Small random programs with eager breaks: Python source that can be read, run eagerly and captured.

Every program is valid: what it reads it has written, what a break writes it declares, what it returns is no part of an
argument. So any difference between a replay and the eager run is a fault of the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from breakgraph.graph import break_graph, eager_on_graph

Choose = Callable[[int], int]
"""From n to one of 0 .. n - 1: what hypothesis or a random generator decides by."""


@dataclass
class Pair:
    """A container that only a walk over dataclasses sees into."""

    left: Tensor
    right: list[Tensor]


@eager_on_graph
def mix(tensors: list[Tensor]) -> Tensor:
    """Of one shape; the same tensor may come twice."""
    total = torch.zeros_like(tensors[0])
    for index, tensor in enumerate(tensors):
        total = total + torch.tanh(tensor) * (index + 1)
    return total


@eager_on_graph
def group(given: dict[str, Any], scale: float = 0.5) -> dict[str, Any]:
    first, (second, third) = given["x"], given["y"]
    return {"p": first * scale, "q": [torch.sin(second), (third - 1,)]}


@eager_on_graph
def pair(given: Pair) -> Pair:
    return Pair(given.left.cos(), [tensor * 0.25 for tensor in given.right])


@eager_on_graph
def strided(tensor: Tensor) -> Tensor:
    """Columns first: a boundary with default strides would shuffle it."""
    return torch.tanh(tensor).t().contiguous().t()


@eager_on_graph
def part_of_its_own(tensor: Tensor) -> Tensor:
    """A view of a storage that holds more."""
    return torch.stack([tensor * 2, tensor - 3])[1]


@eager_on_graph
def twice(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor, handed on two times."""
    made = tensor.sigmoid()
    return made, made


@eager_on_graph(mutates=("out",))
def into(tensor: Tensor, out: Tensor) -> Tensor:
    out.copy_(torch.tanh(tensor))
    return out


@eager_on_graph(mutates=("out",))
def first_row_into(tensor: Tensor, out: Tensor) -> None:
    out[0] = tensor[0] * 3


@eager_on_graph
def by_its_sign(tensor: Tensor) -> Tensor:
    """Host control flow, which a break may have."""
    return tensor + 1 if tensor.sum().item() > 0 else tensor - 1


@eager_on_graph
def with_a_break_inside(tensor: Tensor) -> Tensor:
    return strided(tensor) + mix([tensor, tensor])


@eager_on_graph
def on_a_side_stream(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.exp().tanh()
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        made = tensor.exp().tanh()
    here.wait_stream(side)
    made.record_stream(here)
    return made


_CALLED = (
    Pair, mix, group, pair, strided, part_of_its_own, twice, into, first_row_into, by_its_sign, with_a_break_inside,
    on_a_side_stream, break_graph,
)  # fmt: skip
NAMES: dict[str, Any] = {"torch": torch, **{called.__name__: called for called in _CALLED}}

Shape = tuple[int, int]
INPUTS: dict[str, Shape] = {"x0": (6, 4), "x1": (6, 4), "x2": (4, 6)}
STATE: dict[str, Shape] = {"s": (6, 4)}
WEIGHTS: dict[str, Shape] = {"w0": (4, 4), "w1": (4, 6), "w2": (6, 4), "w3": (6, 6)}


@dataclass
class Writer:
    """Writes one program, statement by statement."""

    choose: Choose
    lines: list[str] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=lambda: {**INPUTS, **STATE})
    writable: set[str] = field(default_factory=set)
    """Made by the program, with memory that no two of their elements share."""
    count: int = 0

    def pick(self, options: Any) -> Any:
        options = list(options)
        return options[self.choose(len(options))]

    def new(self, code: str, shape: Shape, writable: bool = True) -> str:
        name = f"t{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {code}")
        self.shapes[name] = shape
        if writable:
            self.writable.add(name)
        return name

    def tensor(self) -> str:
        return self.pick(self.shapes)

    def like(self, name: str) -> str:
        """Any tensor of the same shape, itself included."""
        return self.pick(n for n, shape in self.shapes.items() if shape == self.shapes[name])

    def unary(self) -> None:
        name = self.tensor()
        code = self.pick([f"torch.tanh({name})", f"{name} * 0.5 + 1", f"{name}.sigmoid()", f"-{name}"])
        self.new(code, self.shapes[name])

    def binary(self) -> None:
        name = self.tensor()
        other = self.like(name)
        code = self.pick([f"{name} + {other}", f"{name} * {other}", f"torch.maximum({name}, {other})"])
        self.new(f"torch.tanh({code})", self.shapes[name])

    def linear(self) -> None:
        name = self.tensor()
        rows, columns = self.shapes[name]
        weights = [w for w, shape in WEIGHTS.items() if shape[0] == columns]
        if weights:
            weight = self.pick(weights)
            self.new(f"torch.tanh({name} @ {weight})", (rows, WEIGHTS[weight][1]))

    def view(self) -> None:
        name = self.tensor()
        rows, columns = self.shapes[name]
        code, shape = self.pick([
            (f"{name}.t()", (columns, rows)),
            (f"{name}[1:]", (rows - 1, columns)),
            (f"{name}[:, ::2]", (rows, (columns + 1) // 2)),
            (f"{name}.chunk(2)[0]", ((rows + 1) // 2, columns)),
            (f"{name}[None].squeeze(0)", (rows, columns)),
            (f"{name}[:1].expand({rows}, {columns})", (rows, columns)),
        ])  # fmt: skip
        if min(shape) >= 1:
            self.new(code, shape, writable=name in self.writable and "expand" not in code)

    def in_place(self) -> None:
        names = sorted(self.writable)
        if names:
            name = self.pick(names)
            other = self.like(name)
            # The operand is a tensor of its own: torch refuses one that overlaps what is written in another order.
            code = [f"{name}.add_({other} * 0.5)", f"{name}[-1].mul_(0.5)", f"{name}.copy_({other} + 0.25)"]
            self.lines.append(self.pick(code))
            self.lines.append(f"{name}.tanh_()")

    def in_parts(self) -> None:
        name = self.tensor()
        rows, columns = self.shapes[name]
        other = self.like(name)
        made = self.new(f"torch.empty({rows}, {columns}, device=x0.device)", (rows, columns))
        self.lines.append(f"{made}[:1] = {name}[:1]")
        if self.choose(2) and rows > 1:
            self.lines.append(f"{made}[1:] = {other}[1:] * 0.5")
            return
        # The rest is never written, and never read.
        del self.shapes[made]
        self.writable.discard(made)
        self.new(f"{made}[:1] * 2", (1, columns))

    def state(self) -> None:
        self.lines.append(f"s.add_({self.like('s')} * 0.25)")
        self.lines.append("s.tanh_()")

    def drop(self) -> None:
        names = [name for name in self.shapes if name.startswith("t")]
        if len(names) > 2:
            name = self.pick(names)
            self.lines.append(f"del {name}")
            del self.shapes[name]
            self.writable.discard(name)

    def simple_break(self) -> None:
        name = self.tensor()
        callee = self.pick(["strided", "part_of_its_own", "by_its_sign", "with_a_break_inside", "on_a_side_stream"])
        self.new(f"{callee}({name})", self.shapes[name])

    def break_with_containers(self) -> None:
        name = self.tensor()
        shape = self.shapes[name]
        others = [self.like(name) for _ in range(2)]
        kind = self.choose(4)
        if kind == 0:
            self.new(f"mix([{name}, {others[0]}, {others[1]}])", shape)
        elif kind == 1:
            free = self.tensor()
            self.lines.append(f"g = group({{'x': {name}, 'y': ({free}, {others[0]})}}, scale=0.75)")
            self.new("g['p']", shape)
            self.new("g['q'][0]", self.shapes[free])
            self.new("g['q'][1][0]", shape)
            self.lines.append("del g")
        elif kind == 2:
            self.lines.append(f"g = pair(Pair({name}, [{others[0]}, {others[1]}]))")
            self.new("g.left", shape)
            self.new("g.right[1]", shape)
            self.lines.append("del g")
        else:
            self.lines.append(f"g = twice({name})")
            # Two names of one tensor: writing to one would write to the other.
            self.new("g[0]", shape)
            self.new("g[1]", shape)
            self.lines.append("del g")

    def break_that_writes(self) -> None:
        name = self.tensor()
        rows, columns = self.shapes[name]
        if self.choose(2):
            out = self.new(f"torch.empty({rows}, {columns}, device=x0.device)", (rows, columns))
            if self.choose(2):
                self.lines.append(f"into({name}, {out})")
            else:
                self.new(f"into({name}, {out})", (rows, columns))
        else:
            out = self.new(f"{self.like(name)} * 1.5", (rows, columns))
            self.lines.append(f"first_row_into({name}, {out})")

    def empty_break(self) -> None:
        self.lines.append("break_graph()")

    def write(self, num_statements: int) -> Program:
        statements = [
            self.unary, self.binary, self.linear, self.view, self.view, self.in_place, self.in_parts, self.state,
            self.drop, self.simple_break, self.simple_break, self.break_with_containers, self.break_with_containers,
            self.break_that_writes, self.empty_break,
        ]  # fmt: skip
        for _ in range(num_statements):
            self.pick(statements)()
        kept = [self.tensor() for _ in range(1 + self.choose(3))]
        self.lines.append(self.pick([
            f"return [{', '.join(kept)}]",
            f"return {{'a': {kept[0]}, 'b': ({', '.join(kept)},)}}",
            f"return {kept[0]} * 2, {kept[-1]}.t()",
        ]))  # fmt: skip
        return Program("\n".join(self.lines))


@dataclass(frozen=True)
class Program:
    """The body of a function of x0, x1, x2, the state s and the weights."""

    body: str

    @property
    def source(self) -> str:
        names = ", ".join([*INPUTS, *STATE, *WEIGHTS])
        body = "\n".join(f"    {line}" for line in self.body.splitlines())
        return f"def program({names}):\n{body}\n"

    def compile(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = dict(NAMES)
        exec(compile(self.source, "<program>", "exec"), namespace)
        return namespace["program"]  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return self.source


def write_program(choose: Choose) -> Program:
    """A program of three to sixteen statements."""
    return Writer(choose).write(3 + choose(14))
