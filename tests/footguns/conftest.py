"""Every fault is tried on both ways to make segments: the forward recorded as it runs, and traced as a whole first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from breakgraph.backends.tc_piecewise import Tracer
from breakgraph.graph import Plan, PlanFamily

NOT_TRACED = {
    "test_f20_garbage_is_collected_once_a_window_and_never_inside": (
        "its forward asks Python's collector, which no trace can follow; the window is the same"
    ),
    "test_two_programs_take_turns_in_one_pool": "hundreds of programs, each of which is traced: there is a smaller one",
    "test_f22_f45_state_that_is_first_made_in_a_capture_names_its_holder": (
        "the forward's Python does not run while its trace is captured, so nothing can be made there"
    ),
    "test_f13_f14_lengths_that_stay_as_captured_are_no_silent_answer": (
        "a trace does not get at the lengths of a step outside of a break: a test of its own shows the refusal"
    ),
}
"""Tests that a trace has no part in, with the reason; those of two ranks, too, which run in processes of their own."""


ONLY_TRACED = (
    "test_traced_programs_take_turns_in_one_pool",
    "test_f13_f14_a_trace_refuses_to_read_lengths_outside_of_a_break",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.function.__name__
    if name in ONLY_TRACED:
        ways = ["traced"]
    else:
        ways = ["recorded"] if name in NOT_TRACED or "on_two_ranks" in metafunc.fixturenames else ["recorded", "traced"]
    metafunc.parametrize("_way", ways, indirect=True)


@pytest.fixture(autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes families trace what they capture with breaks, as the backend ``tc_piecewise`` asks them to."""
    if request.param == "recorded":
        return
    torch._dynamo.reset()
    recorded: Callable[..., Plan] = PlanFamily.capture

    def traced(family: PlanFamily, fn: Callable[[], Any], **options: Any) -> Plan:
        if options.get("breaks", True) and options.get("compiler") is None:
            tracer = Tracer("eager")
            options["compiler"] = lambda restore: tracer.compiled(fn, family.device.torch_device.type, restore)
        return recorded(family, fn, **options)

    monkeypatch.setattr(PlanFamily, "capture", traced)
