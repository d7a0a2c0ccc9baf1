"""The one tree walk for break arguments, break results and outputs.

Containers: tuple (named ones too), list, dict (and its subclasses, such as ``ModelOutput``) and dataclass instances.
Everything else is a leaf; what a leaf may be is decided by whoever walks.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import torch

Tree = Any
"""A tensor, a constant, or a container of trees."""

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(Ellipsis), slice,
)  # fmt: skip


def is_constant(leaf: object) -> bool:
    """Whether ``leaf`` is immutable and can be compared with ``==`` at every replay."""
    return isinstance(leaf, _CONSTANTS)


def is_scattered(tensor: torch.Tensor) -> bool:
    """Whether it is not one piece of memory: sparse tensors are not."""
    return tensor.layout is not torch.strided


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it stands for many inside of `torch.func.vmap`, or is followed by one of its kind."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def layout_of(tensor: torch.Tensor) -> str:
    """For a person: ``sparse_coo``, say."""
    return str(tensor.layout).removeprefix("torch.")


def _children(node: Tree) -> list[tuple[str, Tree]] | None:
    if isinstance(node, torch.Size):
        return None
    if isinstance(node, tuple | list):
        return [(f"[{i}]", child) for i, child in enumerate(node)]
    if isinstance(node, dict):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _rebuild(node: Tree, children: list[Tree]) -> Tree:
    if isinstance(node, tuple):
        return getattr(type(node), "_make", type(node))(children)
    if isinstance(node, list):
        return children
    if isinstance(node, dict):
        fresh = copy.copy(node)
        for key, child in zip(list(node), children, strict=True):
            fresh[key] = child
        return fresh
    fresh = copy.copy(node)
    for field, child in zip(dataclasses.fields(node), children, strict=True):
        object.__setattr__(fresh, field.name, child)
    return fresh


def tree_map(fn: Callable[[Any, str], Any], node: Tree, path: str = "") -> Tree:
    """A copy of ``node`` with every leaf replaced by ``fn(leaf, path)``; containers keep their types."""
    children = _children(node)
    if children is None:
        return fn(node, path)
    return _rebuild(node, [tree_map(fn, child, path + step) for step, child in children])


def tree_leaves(node: Tree, path: str = "") -> list[tuple[str, Any]]:
    """All leaves with their paths, in a fixed order."""
    children = _children(node)
    if children is None:
        return [(path, node)]
    return [leaf for step, child in children for leaf in tree_leaves(child, path + step)]


def tree_structure(node: Tree) -> Any:
    """A comparable description of the containers: equal exactly when types and keys are."""
    children = _children(node)
    if children is None:
        return None
    return (type(node), tuple((step, tree_structure(child)) for step, child in children))


def describe(leaf: object) -> str:
    """A leaf in a few words, for error messages."""
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return f"{dtype}{list(leaf.shape)} strides {list(leaf.stride())} on {leaf.device}"
    text = repr(leaf)
    return f"{type(leaf).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
