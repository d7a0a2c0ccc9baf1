"""What recorders leave out for speed, held to what they may not leave out."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from breakgraph.errors import UncapturableOpError
from breakgraph.graph import PlanFamily, eager_on_graph
from breakgraph.graph.builder import _FirstRun
from breakgraph.graph.compiled import without_mode
from breakgraph.graph.effects import tensors_in
from breakgraph.graph.op_facts import OpFacts, OpTable
from breakgraph.graph.refusals import cuda_transfer_fault, forbidden_fault, op_fault


def _operators() -> list[torch._ops.OpOverload]:
    """Every operator that torch has."""
    found = []
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.partition(".")
        namespace, _, operator = name.partition("::")
        if namespace == "aten":
            found.append(getattr(getattr(torch.ops.aten, operator), overload or "default"))
    return found


def test_whatever_can_be_refused_is_suspect() -> None:
    device: Any = SimpleNamespace(is_cuda=True, is_pinned=lambda: False)
    host: Any = SimpleNamespace(is_cuda=False, is_pinned=lambda: False)
    mask = torch.ones(2, dtype=torch.bool)
    refused = [
        func
        for func in _operators()
        if op_fault(func, (mask, [mask]))
        or cuda_transfer_fault(func, (device, host), {}, [device, host])
        or cuda_transfer_fault(func, (device,), {"device": "cpu"}, [device])
    ]
    assert {torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor, torch.ops.aten.resize_.default} <= set(refused)
    assert torch.ops.aten.nonzero.default in refused
    assert torch.ops.aten._local_scalar_dense.default in refused
    assert [func for func in refused if not OpFacts.of(func, "cuda").is_suspect] == []


def test_what_is_made_of_other_operators_is_known() -> None:
    table, aten = OpTable("cpu"), torch.ops.aten
    assert table[aten.linear.default].is_composite
    assert table[aten.upsample_bilinear2d.vec].is_composite
    assert not table[aten.mm.default].is_composite
    assert not table[aten.silu_backward.default].is_composite  # elsewhere; a CPU has a kernel for it
    assert table[aten.mm.default] is table[aten.mm.default]


def test_facts_of_views_allocations_and_writes() -> None:
    aten = torch.ops.aten
    view, flip, empty, write = (
        OpFacts.of(func, "cpu") for func in (aten.t.default, aten.t_.default, aten.empty_like.default, aten.add_.Tensor)
    )
    assert (view.is_view, view.is_launched) == (True, False)
    assert (flip.is_view, flip.is_mutable, flip.is_launched) == (True, True, False)
    assert (empty.allocates_only, empty.is_launched) == (True, False)
    assert (write.is_view, write.is_launched, write.is_mutable) == (False, True, True)
    assert OpFacts.of(aten._local_scalar_dense.default, "cpu").reads_host


def test_kernels_for_all_devices_come_before_parts() -> None:
    library = torch.library.Library("breakgraph_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x.cumsum(0), "CompositeImplicitAutograd")
    library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    doubled, x = torch.ops.breakgraph_test.doubled, torch.ones(4)
    with torch.inference_mode(), PlanFamily("cpu") as family:
        plan = family.capture(lambda: doubled(x) + 1)
        assert plan.replay().tolist() == (doubled(x) + 1).tolist() == [3.0] * 4


def test_what_torch_says_of_streams_that_are_captured_is_told() -> None:
    func, said = torch.ops.aten.mm.default, "operation not permitted when stream is capturing"
    fault = forbidden_fault(func, RuntimeError(f"CUDA error: {said}\nand more"))
    assert fault is not None
    assert fault.why.endswith(f"(CUDA error: {said})")
    for other in (UncapturableOpError(said), RuntimeError("operation failed due to a previous error during capture")):
        assert forbidden_fault(func, other) is None


def test_operators_inside_a_composite_one_are_refused_in_inference_mode() -> None:
    x = torch.randn(4)
    with torch.inference_mode(), PlanFamily("cpu") as family, pytest.raises(UncapturableOpError, match="nonzero"):
        family.capture(lambda: x.argwhere())


def test_tensors_are_found_in_lists_of_lists() -> None:
    one, two, three = (torch.zeros(n) for n in (1, 2, 3))
    found = tensors_in(one, 2, None, [two, None, [three]], "text", (one,))
    assert [t.numel() for t in found] == [1, 2, 3, 1]


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_that_stepped_aside_comes_back_where_it_was() -> None:
    guard, above, later = _Mode(), _Mode(), _Mode()
    with ExitStack() as stack:
        stack.enter_context(guard)
        stack.enter_context(above)
        before = _get_current_function_mode_stack()
        with without_mode(guard):
            assert _get_current_function_mode_stack() == [mode for mode in before if mode is not guard]
            stack.enter_context(later)  # stays, as torch.set_default_device() does
        assert _get_current_function_mode_stack() == [*before, later]


def test_a_break_may_leave_a_mode_behind() -> None:
    x = torch.randn(4)
    kept = ExitStack()

    @eager_on_graph
    def enters(t: Tensor) -> Tensor:
        kept.enter_context(_Mode())
        return t * 2

    before = _get_current_function_mode_stack()
    refused = pytest.raises(UncapturableOpError, match="tolist")  # the capture's own watch is on again
    with torch.no_grad(), PlanFamily("cpu") as family, kept, refused:
        family.capture(lambda: enters(x + 1) + (x + 2).tolist()[0])
    assert _get_current_function_mode_stack() == before


def test_a_side_stream_waits_before_a_break_first_uses_it() -> None:
    order: list[str] = []

    class _Stream:
        def wait_stream(self, other: object) -> None:
            order.append("waits for main" if other is main else "waits for something else")

    main, side = _Stream(), _Stream()
    device: Any = SimpleNamespace(stream=main, current_stream=lambda: device.stream)
    watch = _FirstRun(device, OpTable("cpu"))
    x = torch.zeros(2)
    with torch.no_grad(), watch:
        x.add_(1)
        device.stream = side
        assert order == []
        x.add_(1)
        x.add_(1)
    assert order == ["waits for main"]
    assert watch.side_streams == [side]
