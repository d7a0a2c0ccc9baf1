"""One tree walk for everything."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.graph.tree import is_constant, tree_leaves, tree_map, tree_structure

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Box:
    content: object
    label: str = "box"


trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda child: (
        st.lists(child, max_size=3)
        | st.tuples(child, child)
        | st.dictionaries(st.text(max_size=2), child, max_size=3)
        | st.builds(Point, child, child)
        | st.builds(Box, child)
    ),
    max_leaves=12,
)


@given(trees)
def test_mapping_keeps_structure_order_and_the_original(tree: object) -> None:
    before = repr(tree)
    mapped = tree_map(lambda leaf, path: (path, leaf).__repr__(), tree)
    assert tree_structure(mapped) == tree_structure(tree)
    assert [leaf for _, leaf in tree_leaves(mapped)] == [repr(pair) for pair in tree_leaves(tree)]
    assert repr(tree) == before


def test_model_outputs_are_containers() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    output = BaseModelOutputWithPast(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1),))
    mapped = tree_map(lambda leaf, _: leaf + 1, output)
    assert isinstance(mapped, BaseModelOutputWithPast)
    assert mapped.last_hidden_state.tolist() == [2, 2]
    assert mapped["hidden_states"][0].tolist() == [1]
    assert [path for path, _ in tree_leaves(output)] == ["['last_hidden_state']", "['hidden_states'][0]"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ((1,), (1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (Point(1, 2), (1, 2)),
        (Box(1), (1, "box")),
        ([1, [2]], [1, 2]),
    ],
)
def test_structures_differ_by_type_and_key(one: object, other: object) -> None:
    assert tree_structure(one) != tree_structure(other)


def test_paths_lead_to_the_leaf() -> None:
    tree = {"batch": Box([Point(1, (2, 3))])}
    assert [path for path, _ in tree_leaves(tree, "arg")] == [
        "arg['batch'].content[0][0]",
        "arg['batch'].content[0][1][0]",
        "arg['batch'].content[0][1][1]",
        "arg['batch'].label",
    ]


def test_constants() -> None:
    assert all(map(is_constant, (None, True, 1, 1.5, "s", b"b", torch.float32, torch.device("cpu"), slice(1))))
    assert not any(map(is_constant, (object(), {1}, torch.ones(1), lambda: 0)))
