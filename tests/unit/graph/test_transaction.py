"""A capture happens whole or not at all; a replay that fails hurts nothing but itself."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from breakgraph.errors import CaptureError, ClosedError, ConfigError, ReplayError, UncapturableOpError
from breakgraph.graph import PlanFamily, eager_on_graph
from interrupts import interrupted


class Boom(Exception):
    pass


@eager_on_graph
def halve(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize("where", ["segment", "break 0", "break 2", "interrupt"])
def test_the_first_error_arrives_and_nothing_is_left(device: torch.device, where: str) -> None:
    x = torch.randn(1024, device=device)
    calls = iter(range(100))
    error = KeyboardInterrupt if where == "interrupt" else Boom

    @eager_on_graph
    def step(t: Tensor, index: int) -> Tensor:
        if where == f"break {index}" and next(calls) > 0:
            raise Boom(where)
        return t * 2

    def fn() -> Tensor:
        y = x + 1
        for i in range(4):
            y = step(y, i) + torch.rand_like(x)
        if where in ("segment", "interrupt") and next(calls) > 0:
            raise error(where)
        return y

    with torch.no_grad():
        family = PlanFamily(device)
        rng = torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None
        with pytest.raises(error, match=where):
            family.capture(fn)
        assert gc.isenabled()
        assert torch.equal(torch.get_rng_state(), rng[0])
        if rng[1] is not None:
            assert torch.equal(torch.cuda.get_rng_state(), rng[1])
            assert not torch.cuda.is_current_stream_capturing()
        assert halve(x + 1).shape == x.shape  # marked calls are plain again
        plan = family.capture(lambda: halve(x + 1) * 2)
        assert torch.equal(plan.replay(), (x + 1) / 2 * 2)
        family.close()


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: 1 if x.sum() > 0 else 2, "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "boolean mask"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: torch.unique(x), "unique"),
        (lambda x: torch.repeat_interleave(x, (x > 0).long()), "repeat_interleave"),
        (lambda x: x + torch.tensor([1.0] * 4, device=x.device), "tensor"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.copy_(torch.tensor([1.0] * 4)), "copy_"),
        (lambda x: x[0].copy_(torch.tensor(1.0)), "copy_"),
        (lambda x: x.resize_(2), "resize_"),
    ],
)
def test_what_no_graph_can_hold_is_named_with_its_line(
    device: torch.device, family: PlanFamily, use: object, named: str
) -> None:
    x = torch.ones(4, device=device)

    def fn() -> Tensor:
        y = x + 1
        use(y)  # type: ignore[operator]
        return y

    with torch.no_grad():
        with pytest.raises(UncapturableOpError, match=named) as caught:
            family.capture(fn)
        assert "test_transaction.py" in str(caught.value)
        assert "eager break" in str(caught.value)
        plan = family.capture(lambda: eager_on_graph(lambda t: (use(t.clone()), t * 2)[1])(x + 1) + 1)  # type: ignore[operator]
        assert torch.equal(plan.replay(), (x + 1) * 2 + 1)


def test_a_failing_break_voids_the_replay_and_not_the_plan(device: torch.device, family: PlanFamily) -> None:
    fail = {"now": False}

    @eager_on_graph
    def fragile(t: Tensor) -> Tensor:
        if fail["now"]:
            raise Boom("replay")
        return t * 2

    x = torch.randn(4, device=device)
    with torch.no_grad():
        plan = family.capture(lambda: fragile(x) + 1)
        plan.replay()
        fail["now"] = True
        with pytest.raises(Boom):
            plan.replay()
        with pytest.raises(ReplayError, match="failed"):
            _ = plan.outputs
        fail["now"] = False
        assert torch.equal(plan.replay(), x * 2 + 1)


def test_registered_state_is_put_back(device: torch.device, family: PlanFamily) -> None:
    x, count = torch.randn(4, device=device), torch.zeros(1, device=device)

    def fn() -> Tensor:
        count.add_(1)
        return halve(x) + count

    with torch.no_grad():
        plan = family.capture(fn, state=(count,))
        assert count.item() == 0
        plan.replay()
        plan.replay()
        assert count.item() == 2


def test_a_closed_plan_or_family_says_so(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        one, two = family.capture(lambda: x + 1), family.capture(lambda: x + 2)
        one.close()
        one.close()
        with pytest.raises(ClosedError, match="capture it again"):
            one.replay()
        assert torch.equal(two.replay(), x + 2)
        family.close()
        family.close()
        for use in (two.replay, lambda: family.capture(lambda: x + 1)):
            with pytest.raises(ClosedError):
                use()


def test_captures_do_not_nest_and_options_are_checked(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    runs = iter(range(9))

    def nested() -> Tensor:
        return family.capture(lambda: x + 1).replay() if next(runs) else x + 1

    with torch.no_grad(), pytest.raises(CaptureError, match="already capturing"):
        family.capture(nested)
    with pytest.raises(ConfigError, match='"borrow", "copy" or "poison"'):
        family.capture(lambda: x + 1, outputs="view")  # type: ignore[arg-type]


def test_a_break_may_not_replay_its_own_family(device: torch.device, family: PlanFamily) -> None:
    x = torch.randn(4, device=device)
    with torch.no_grad():
        inner = family.capture(lambda: x * 2)
        replaying = {"now": False}
        marked = eager_on_graph(lambda t: inner.replay().clone() if replaying["now"] else t.clone())
        outer = family.capture(lambda: marked(x) + 1)
        replaying["now"] = True
        with pytest.raises(ReplayError, match="own family"):
            outer.replay()


def test_a_replay_that_the_user_interrupts_anywhere_leaves_the_family_as_it_was() -> None:
    x = torch.randn(8)
    with torch.no_grad(), PlanFamily("cpu") as family:
        family.checks_late = True
        plan = family.capture(lambda: x + 1)
        expected, point = plan.replay().clone(), 0
        for point in interrupted(plan.replay):
            others: list[Tensor] = []
            thread = threading.Thread(target=lambda: others.append(plan.replay().clone()), daemon=True)  # noqa: B023
            thread.start()
            thread.join(10)
            assert others, f"another thread still waits after an interrupt at point {point}"
            assert torch.equal(others[0], expected)
            assert torch.equal(plan.replay(), expected)
        assert point > 30
