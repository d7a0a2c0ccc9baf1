"""Captured calls that a break binds itself: what runs in their place, and what binding may not do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from breakgraph.errors import BreakArgumentError
from breakgraph.graph import Live, Plan, PlanFamily, eager_on_graph


def test_a_bound_call_runs_in_the_place_of_the_function(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]
) -> None:
    calls: list[str] = []
    factor = Live[float]("factor")
    factor.set(2.0)

    class Layer:
        shift = 1.0

        def bound(self, h: Tensor, factor: Live[float], *, out: Tensor) -> Callable[[], None]:
            calls.append("bound")
            top, result = h[:2], out[:2]

            def run() -> None:
                calls.append("run")
                torch.add(top * factor.value, self.shift, out=result)
                out[2:] = 0

            return run

        @eager_on_graph(mutates=("out",), bind=bound)
        def scale(self, h: Tensor, factor: float, *, out: Tensor) -> None:
            calls.append("function")
            out[:2] = h[:2] * factor + self.shift
            out[2:] = 0

    layers, x = [Layer(), Layer()], torch.randn(4, device=device)

    def fn() -> Tensor:
        out = x + 1
        for layer in layers:
            h, out = out, torch.empty_like(x)
            layer.scale(h, factor, out=out)
            out = out * 2
        return out

    with torch.no_grad():
        plan = family.capture(fn)
        assert calls[-4:] == ["bound", "run"] * 2
        for value, shift in ((3.0, 1.0), (0.5, 7.0)):
            x.copy_(torch.randn(4, device=device))
            factor.set(value)
            layers[1].shift = shift
            calls.clear()
            out = replay(plan).clone()
            assert calls == ["run", "run"]
            assert torch.equal(out, fn())


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h * 2,
        lambda h: h.add_(1),
        lambda h: h.item(),
        lambda h: h.tolist(),
        lambda h: torch.stack([h]),
        lambda h: torch.cond(torch.tensor(True), torch.sin, torch.cos, (h,)),
    ],
    ids=["computes", "writes", "item", "tolist", "copies", "higher order"],
)
def test_binding_does_not_read_what_a_tensor_holds(
    device: torch.device, family: PlanFamily, read: Callable[[Tensor], object]
) -> None:
    def bound(h: Tensor) -> Callable[[], Tensor]:
        read(h)
        return lambda: h * 2

    @eager_on_graph(bind=bound)
    def double(h: Tensor) -> Tensor:
        return h * 2

    x = torch.ones(1, device=device)
    with torch.no_grad():
        with pytest.raises(BreakArgumentError, match=r"bind= of break .*double ran .* on a tensor.*compute in the fun"):
            family.capture(lambda: double(x + 1) + 1)
        assert torch.equal(family.capture(lambda: x + 1).replay(), x + 1)


def test_binding_may_look_take_views_and_make_room(
    device: torch.device, family: PlanFamily, replay: Callable[[Plan], Tensor]
) -> None:
    def bound(h: Tensor) -> Callable[[], Tensor]:
        assert (h.shape, h.dtype, h.stride()) == ((4, 2), torch.float32, (2, 1))
        column, room, ones = h.t()[0].unsqueeze(1), torch.empty_like(h), torch.ones(4, 1, device=device)
        h.data_ptr()
        return lambda: torch.add(column, ones, out=room[:, :1])

    @eager_on_graph(bind=bound)
    def first(h: Tensor) -> Tensor:
        return h[:, :1] + 1

    x = torch.randn(4, 2, device=device)

    def fn() -> Tensor:
        return first(x * 3) * 2

    with torch.no_grad():
        plan = family.capture(fn)
        x.copy_(torch.randn(4, 2, device=device))
        assert torch.equal(replay(plan), fn())


def test_binding_to_nothing_is_refused(device: torch.device, family: PlanFamily) -> None:
    @eager_on_graph(bind=lambda h: None)
    def same(h: Tensor) -> Tensor:
        return h

    with pytest.raises(BreakArgumentError, match="gave NoneType None; return the function that is to run"):
        family.capture(lambda: same(torch.ones(2, device=device) + 1) + 1)
