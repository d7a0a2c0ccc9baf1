"""Breaks that do the work on their arguments once, at the capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from breakgraph.graph import Plan, PlanFamily
from breakgraph.graph.eager_break import BoundBreak


def test_a_bound_call_runs_in_the_place_of_the_function(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]
) -> None:
    calls: list[str] = []
    factor = [2.0]

    def bound(h: Tensor, *, out: Tensor) -> Callable[[], None]:
        calls.append("bound")
        top, result = h[:2], out[:2]

        def run() -> None:
            calls.append("run")
            torch.mul(top, factor[0], out=result)
            out[2:] = 0

        return run

    @partial(BoundBreak, bind=bound, mutates=("out",))
    def scale(h: Tensor, *, out: Tensor) -> None:
        calls.append("function")
        out[:2] = h[:2] * factor[0]
        out[2:] = 0

    x = torch.randn(4, device=device)

    def fn() -> Tensor:
        out = x + 1
        for _ in range(2):
            h, out = out, torch.empty_like(x)
            scale(h, out=out)
            out = out * 2
        return out

    with torch.no_grad():
        plan = family.capture(fn)
        assert calls[-4:] == ["bound", "run"] * 2
        for value in (3.0, 0.5):
            x.copy_(torch.randn(4, device=device))
            factor[0] = value
            calls.clear()
            out = replay(plan).clone()
            assert calls == ["run", "run"]
            assert torch.equal(out, fn())
            assert calls[2:] == ["function", "function"]


def test_what_a_bound_call_raises_voids_the_replay_and_no_more(device: torch.device, family: PlanFamily) -> None:
    failures: list[Exception] = []

    def bound(h: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if failures:
                raise failures.pop()
            return h * 2

        return run

    double = BoundBreak(lambda h: h * 2, bind=bound)
    x = torch.ones(2, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: double(x + 1) + 1)
        failures.append(KeyError("gone"))
        with pytest.raises(KeyError, match="gone"):
            plan.replay()
        assert plan.replay().tolist() == [5, 5]
