"""Runs a random program eagerly and replayed under poison, and compares every bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from breakgraph.graph import Plan, PlanFamily
from breakgraph.graph.tree import tree_leaves
from footguns.programs import INPUTS, STATE, WEIGHTS, Program

ROUNDS = 2


class Memory:
    """The static tensors that programs read and write."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shapes = {**INPUTS, **STATE, **WEIGHTS}
        self.tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        self.refill()

    @property
    def state(self) -> list[Tensor]:
        return [self.tensors[name] for name in STATE]

    def refill(self) -> None:
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator))


def copies(tree: Any) -> list[Tensor]:
    return [leaf.clone() for _, leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@torch.no_grad()
def differences(programs: list[Program], device: torch.device, seed: int = 0) -> list[str]:
    """What of the programs' outputs and state differs from eager, in replays that take turns in one pool."""
    memory = Memory(device, seed)
    functions = [program.compile() for program in programs]
    found: list[str] = []
    with PlanFamily(device) as family:
        plans: list[Plan] = []
        for function in functions:
            memory.refill()
            before = [tensor.clone() for tensor in memory.state]
            plans.append(family.capture(lambda function=function: function(**memory.tensors), state=memory.state))
            if not all(map(torch.equal, before, memory.state)):
                found.append(f"program {len(plans) - 1}: the capture changed the state")
        for turn in range(ROUNDS):
            for index, (function, plan) in enumerate(zip(functions, plans, strict=True)):
                memory.refill()
                before = [tensor.clone() for tensor in memory.state]
                expected = copies(function(**memory.tensors)) + copies(memory.state)
                for tensor, value in zip(memory.state, before, strict=True):
                    tensor.copy_(value)
                family.poison()
                got = copies(plan.replay()) + copies(memory.state)
                wrong = [
                    place for place, (a, b) in enumerate(zip(expected, got, strict=True)) if not torch.equal(a, b)
                ]
                if wrong:
                    found.append(f"program {index}, turn {turn}: outputs {wrong} of {len(expected)} differ")
    return found
