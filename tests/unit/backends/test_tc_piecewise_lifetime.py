"""Traced backends where nothing is traced, where a capture fails, and where they are closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor

import breakgraph
from breakgraph.backends import make_backend
from breakgraph.errors import CaptureError, UntraceableError
from breakgraph.graph import PlanFamily, ShapeKey, eager_on_graph

NAMES = ("tc_piecewise", "tc_piecewise_inductor")
KEY = ShapeKey("toy", 0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@eager_on_graph
def mid(x: Tensor) -> Tensor:
    return x.cumsum(0)


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile", "disabled"])
def test_a_forward_that_is_not_traced_is_refused(stance: str, family: PlanFamily, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    backend = make_backend("tc_piecewise", family)

    def forward() -> Tensor:
        return mid(x + 1) * 2

    message = r"traced nothing of the forward: .*TORCHDYNAMO_DISABLE=1.*use backend 'breakable'"
    is_off = stance == "disabled"
    switch = torch._dynamo.config.patch(disable=True) if is_off else torch.compiler.set_stance(stance)
    with switch, pytest.raises(UntraceableError, match=message):
        backend.capture(KEY, forward)
    assert not backend.captured(KEY)
    backend.capture(KEY, forward)  # it is traced again as soon as it may be
    x.fill_(3)
    assert torch.equal(backend.replay(KEY), forward())
    assert backend.explain()[KEY].num_breaks == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_without_operators_needs_no_trace(name: str, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with breakgraph.capture(lambda x: {"given": x, "number": 3}, x, backend=name) as graph:
        x.fill_(5)
        assert graph.replay()["number"] == 3
        assert torch.equal(graph.replay()["given"], x)


def _changing(device: torch.device, num_calls: int) -> tuple[Callable[[], Tensor], weakref.ref[Tensor]]:
    """A forward whose break returns another number after so many calls, and the weight that it alone keeps."""
    weight = torch.ones(3, 3, device=device)
    numbers = iter([1] * num_calls + [2] * 9)

    @eager_on_graph
    def count(x: Tensor) -> tuple[Tensor, int]:
        return x + 1, next(numbers)

    def forward() -> Tensor:
        made, number = count(weight @ weight)
        return made * number

    return forward, weakref.ref(weight)


@pytest.mark.parametrize("num_calls", [2, 3], ids=["when traced", "when captured"])
@pytest.mark.parametrize("name", NAMES)
def test_a_failed_capture_keeps_nothing(name: str, num_calls: int, family: PlanFamily, device: torch.device) -> None:
    backend = make_backend(name, family)
    forward, weight = _changing(device, num_calls)
    with pytest.raises(CaptureError, match="is not what it returned before the forward was traced"):
        backend.capture(KEY, forward)
    assert backend.reference(KEY, forward) is forward
    del forward
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_backend_keeps_nothing(name: str, family: PlanFamily, device: torch.device) -> None:
    backend = make_backend(name, family)
    forward, weight = _changing(device, 9)
    backend.capture(KEY, forward)
    backend.close()
    assert backend.reference(KEY, forward) is forward
    del forward
    gc.collect()
    assert weight() is None
