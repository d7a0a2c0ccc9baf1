"""Bits, distances, digests, and what is near enough."""

from __future__ import annotations

import math

import pytest
import torch

from breakgraph.verify.compare import difference, differences, digest, distance, same_bits, spread, within

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor(True), torch.tensor(True), True),
        (torch.ones(2, 3).t(), torch.ones(3, 2), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), True),
        (torch.ones(0), torch.ones(0), True),
    ],
)
def test_the_same_bits(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert same_bits(one, other) is same
    if one.dtype == other.dtype and one.shape == other.shape:
        assert bool(digest(one) == digest(other)) is same


def test_a_digest_sees_a_bit_and_a_swap() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    swapped, nudged = values.clone(), values.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    nudged[500] = torch.nextafter(nudged[500], torch.tensor(math.inf))
    assert len({int(digest(t)) for t in (values, swapped, nudged, values.clone())}) == 3


def test_a_difference_says_where_and_how_much() -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, -8.0]])
    got = torch.tensor([[1.0, 2.0], [3.5, NAN]])
    found = difference(got, expected, "output")
    assert found is not None
    assert (found.num_different, found.num_elements, found.first_index) == (2, 4, (1, 0))
    assert (found.max_abs, found.num_non_finite) == (0.5, 1)
    assert str(found) == (
        "output: 2 of 4 elements differ, first at [1, 0]; by 0.5 at most; 1 are NaN or infinite and should not be"
    )
    assert difference(expected, expected.clone(), "output") is None
    other = difference(torch.ones(3), torch.ones(2), "output")
    assert other is not None
    assert other.path == "output, float32[3] in place of float32[2]"


def test_trees_and_constants() -> None:
    one, other = {"a": torch.ones(2), "b": [1, "x"]}, {"a": torch.ones(2), "b": [2, "x"]}
    assert differences(one, one) == []
    assert [item.path for item in differences(one, other)] == ["output['b'][0], 1 in place of 2"]


def test_distance_is_of_the_finite_ones() -> None:
    assert distance(torch.tensor([1.0, NAN, 4.0]), torch.tensor([2.0, 5.0, 4.0])) == (1.0, 0.25)
    assert distance(torch.tensor([NAN]), torch.tensor([1.0])) == (0.0, 0.0)
    assert distance(torch.tensor([1.0]), torch.tensor([0.0]))[1] == math.inf
    assert distance(torch.tensor([3]), torch.tensor([5])) == (2.0, 0.4)


def test_within_the_spread_of_runs() -> None:
    runs = [[torch.tensor([1.0])], [torch.tensor([1.2])], [torch.tensor([1.1])]]
    (gap,) = spread(runs)
    assert gap == pytest.approx(0.2)
    assert within([torch.tensor([1.35])], runs, [gap])
    assert not within([torch.tensor([1.5])], runs, [gap])
    assert not within([torch.tensor([NAN])], runs, [gap])
    assert spread([*runs, [torch.tensor([NAN])]]) == [math.inf]
