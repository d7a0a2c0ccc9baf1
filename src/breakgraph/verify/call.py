"""Verification of a captured callable: fresh values in its static inputs, whatever it was captured from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from breakgraph.graph import PlanFamily
from breakgraph.graph.boundary import overlaps_itself
from breakgraph.graph.modes import ExecMode
from breakgraph.graph.pretence import as_if_capturing
from breakgraph.graph.tree import Tree, tree_leaves
from breakgraph.verify.arms import Case, check, cloned
from breakgraph.verify.bisect import find_culprit
from breakgraph.verify.report import VerifyReport

NUM_ROUNDS = 3
"""The given values, then fresh random ones."""


@dataclass(frozen=True, eq=False)
class Call:
    """What was captured.

    Attributes:
        mode: Grad, inference and autocast modes that it was captured under.
        breaks: Whether marked calls are breaks of the plan.
    """

    fn: Callable[..., Tree]
    inputs: Sequence[Any]
    state: Sequence[Tensor]
    replay: Callable[[], Tree]
    family: PlanFamily
    mode: ExecMode
    breaks: bool

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that a run may find changed: the tensors among the inputs, then the state."""
        inputs = [leaf for _, leaf in tree_leaves(tuple(self.inputs)) if isinstance(leaf, Tensor)]
        return [*inputs, *self.state]


class _CallCase(Case):
    def __init__(self, call: Call, step: str, start: Sequence[Tensor], given: Sequence[Tensor], rng: Any) -> None:
        super().__init__(call.family, step, call.breaks)
        self._call = call
        self._start = start
        self._given = given
        self._rng = rng

    def _reset(self, values: Sequence[Tensor]) -> None:
        _store(self._call.tensors, values)
        self.family.device.set_rng_state(self._rng)

    def _result(self, outputs: Tree) -> Tree:
        return {"output": cloned(outputs), "inputs and state": cloned(self._call.tensors)}

    def eager(self) -> Tree:
        with self.ready() as forward:
            return self._result(forward())

    def replay(self) -> Tree:
        self._reset(self._start)
        self.poison()
        return self._result(self._call.replay())

    @contextmanager
    def ready(self) -> Iterator[Callable[[], Tree]]:
        self._reset(self._start)
        with self._call.mode.apply(), as_if_capturing(breaks=self._call.breaks):
            yield lambda: self._call.fn(*self._call.inputs)

    @contextmanager
    def ready_for_capture(self) -> Iterator[Callable[[], Tree]]:
        self._reset(self._given)
        with self._call.mode.apply():
            yield lambda: self._call.fn(*self._call.inputs)


def verify_call(call: Call, *, rounds: int = NUM_ROUNDS, seed: int = 0) -> VerifyReport:
    """Compare replays with eager runs; inputs, state and random generators are as before when it returns.

    Args:
        call: The callable and its replay.
        rounds: Steps; the first has the values that the inputs hold now.
        seed: Of the values of the others.
    """
    device = call.family.device
    given, rng = cloned(call.tensors), device.rng_state()
    num_inputs = len(call.tensors) - len(call.state)
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    steps, culprit = [], None
    try:
        for number in range(rounds):
            fresh = [fresh_like(t, generator) for t in given[:num_inputs]] if number else given[:num_inputs]
            step = "the given values" if number == 0 else f"random values {number}"
            case = _CallCase(call, step, [*fresh, *given[num_inputs:]], given, rng)
            steps.append(check(case).report)
            if not steps[-1].ok:
                culprit = find_culprit(case)
                break
    finally:
        _store(call.tensors, given)
        device.set_rng_state(rng)
        device.synchronize()
    return VerifyReport(subject="capture", steps=tuple(steps), culprit=culprit)


def fresh_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Random values of the same kind: floats of the same mean and deviation; integers between the least and the
    greatest, so that indices stay valid, and in order with the ends kept where they were in order."""
    if tensor.numel() == 0 or overlaps_itself(tensor):
        return tensor
    shape, device = tensor.shape, tensor.device
    if tensor.is_floating_point() or tensor.is_complex():
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        values = tensor.to(wide)
        finite = values[torch.isfinite(values)]
        deviation = float(finite.std(correction=0).real) if finite.numel() else 0.0
        center = finite.mean() if finite.numel() else torch.zeros((), dtype=wide, device=tensor.device)
        return (center + torch.randn(shape, generator=generator, dtype=wide, device=device) * (deviation or 1.0)).to(
            tensor.dtype
        )
    if tensor.dtype == torch.bool:
        return torch.randint(2, shape, generator=generator, device=device).to(torch.bool)
    low, high = int(tensor.min()), int(tensor.max())
    drawn = torch.randint(low, high + 1, shape, generator=generator, device=device).to(tensor.dtype)
    if tensor.dim() == 1 and tensor.numel() > 1 and bool((tensor[1:] >= tensor[:-1]).all()):
        drawn = drawn.sort().values
        drawn[0], drawn[-1] = low, high
    return drawn


def _store(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            if not overlaps_itself(tensor):
                tensor.detach().copy_(value)
