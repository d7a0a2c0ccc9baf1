"""Random programs, replayed under poison, have eager's bits: lifetimes, aliases, views, partial writes, containers."""

from __future__ import annotations

import hypothesis
import torch
import torch._dynamo
from hypothesis import strategies as st

from footguns.checker import differences
from footguns.programs import Program, write_program


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return write_program(lambda n: draw(st.integers(0, n - 1)))


@hypothesis.settings(max_examples=250, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(one=programs(), other=programs())
def test_two_programs_take_turns_in_one_pool(device: torch.device, one: Program, other: Program) -> None:
    assert differences([one, other], device) == [], f"\n{one}\n{other}"


@hypothesis.settings(max_examples=8, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(one=programs(), other=programs())
def test_traced_programs_take_turns_in_one_pool(device: torch.device, one: Program, other: Program) -> None:
    torch._dynamo.reset()
    assert differences([one, other], device) == [], f"\n{one}\n{other}"
