"""Two captures of one bucket: what they bake in and should not is named by operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import breakgraph
from breakgraph.errors import BakedValueError
from breakgraph.graph.audit import audit, compare
from breakgraph.graph.device import RecordedCall

WEIGHT = torch.randn(8, 8)


def variations(forward: Callable[[Tensor, int], Tensor]) -> Callable[[int], Callable[[], Tensor]]:
    """Other values, other addresses, another length."""

    def make(variation: int) -> Callable[[], Tensor]:
        x, length = torch.randn(4, 8), 3 + variation
        return lambda: forward(x, length)

    return make


def clean(x: Tensor, length: int) -> Tensor:
    return (x @ WEIGHT).softmax(-1) + x


def scaled(x: Tensor, length: int) -> Tensor:
    return (x @ WEIGHT) * length


def host_scalar(x: Tensor, length: int) -> Tensor:
    return x @ WEIGHT + torch.tensor(float(length))


def sliced(x: Tensor, length: int) -> Tensor:
    return (x @ WEIGHT)[:, :length].sum(-1)


def branches(x: Tensor, length: int) -> Tensor:
    return (x @ WEIGHT).relu() if length > 3 else (x @ WEIGHT).tanh()


@breakgraph.eager_on_graph
def attend(h: Tensor, max_length: int) -> Tensor:
    return h * 2


def passes_a_length(x: Tensor, length: int) -> Tensor:
    return attend(x @ WEIGHT, length) + 1


def test_f14_nothing_is_found_where_only_values_and_addresses_differ() -> None:
    with torch.no_grad():
        report = audit(variations(clean), "cpu")
    assert report.differences == ()
    assert report.num_words > 8
    assert report.coverage == 1
    report.check()


@pytest.mark.parametrize(
    ("forward", "name", "argument"),
    [
        (scaled, "aten.mul.Tensor", "other"),
        (host_scalar, "aten.add.Tensor", "other"),
        (sliced, "aten.sum.dim_IntList", "self"),
        (branches, "aten.tanh.default", "call"),
        (passes_a_length, "attend", "argument [1]"),
    ],
)
def test_f14_a_baked_value_is_named(forward: Callable[[Tensor, int], Tensor], name: str, argument: str) -> None:
    with torch.no_grad():
        report = audit(variations(forward), "cpu")
    assert (report.differences[0].name, report.differences[0].argument) == (name, argument)
    with pytest.raises(BakedValueError, match=rf"(?s){name}: .*{argument.split()[0]}.*put what changes"):
        report.check()


def test_f14_a_declared_difference_passes() -> None:
    with torch.no_grad():
        report = audit(variations(scaled), "cpu", declared=["aten.mul.Tensor"])
    report.check()
    assert [d.first for d in report.declared if d.argument == "other"] == ["3"]
    assert "1 declared" in str(report)


def test_a_call_that_only_one_capture_has_is_named() -> None:
    one, two = RecordedCall("a", {"x": "1"}), RecordedCall("b", {})
    (difference,) = compare([[one]], [[one, two]]).differences
    assert (difference.name, difference.first, difference.second) == ("b", "nothing", "b")


def test_what_cannot_be_read_lowers_the_coverage() -> None:
    call = RecordedCall("kernel", {"x": "1"}, ("parameter 2",))
    report = compare([[call]], [[call]])
    assert report.coverage == 0.5
    assert "kernel: parameter 2" in str(report)


def test_what_changes_from_capture_to_capture_of_the_same_is_no_argument() -> None:
    def clamp(limit: str, between: str) -> list[list[RecordedCall]]:
        return [[RecordedCall("clamp", {"word 0": limit, "word 1": between})]]

    one, other = clamp("0", "a1"), clamp("0", "b7")
    report = compare(one, other, repeats=[(one, clamp("0", "a1")), (other, clamp("0", "c9"))])
    assert report.differences == ()
    assert report.unread == ("clamp: word 1 changes from capture to capture of the same",)
    assert report.coverage == 0.5
    # A limit that is the variation's own is one.
    one, other = clamp("0", "a1"), clamp("1", "b7")
    report = compare(one, other, repeats=[(one, clamp("0", "a2")), (other, clamp("1", "b7"))])
    assert [d.argument for d in report.differences] == ["word 0"]
