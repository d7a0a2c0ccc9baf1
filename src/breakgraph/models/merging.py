"""Linear layers that read the same input, computed as one: queries with keys and values, gates with what they gate.

The model's own code stays as it is. The weights of a group move into one tensor, of which each layer keeps its rows, so
names, shapes and values are those of before; they may be updated in place and not replaced. The layer that is called
first computes for all, the others take their part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that `transformers` gives them, in the order in which its models call them."""


class _Group:
    """Owns: the joint weight, and between the calls of its layers their results."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight = _joined([layer.weight for layer in layers])
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _joined(biases) if biases else None
        self.sizes = [layer.out_features for layer in layers]
        self.parts: tuple[Tensor, ...] = ()


class _First(nn.Linear):
    """The layer that computes. A class, and no function on the instance: Dynamo compiles once for all layers then."""

    group: _Group

    def forward(self, input: Tensor) -> Tensor:
        parts = nn.functional.linear(input, self.group.weight, self.group.bias).split(self.group.sizes, -1)
        self.group.parts = parts[1:]
        return parts[0]


class _Next(nn.Linear):
    """A layer that takes what was computed for it."""

    group: _Group

    def forward(self, input: Tensor) -> Tensor:
        part = self.group.parts[0]
        self.group.parts = self.group.parts[1:]
        return part


def merge_linears(model: nn.Module) -> int:
    """Merge the groups below ``model``; returns how many. Their weights are copied, one group at a time."""
    groups = list(_groups(model))
    for layers in groups:
        group = _Group(layers)
        for layer, kind in zip(layers, [_First, *[_Next] * len(layers)], strict=False):
            layer.__class__ = kind
            layer.__dict__["group"] = group
    return len(groups)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        for names in _GROUPS:
            layers = [module._modules.get(name) for name in names]
            if all(is_plain(layer) for layer in layers) and len({_kind(layer) for layer in layers}) == 1:
                yield layers  # type: ignore[misc]


def is_plain(layer: nn.Module | None) -> bool:
    """Whether calling the layer is the product of torch and nothing else."""
    hooks = layer is not None and (layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__)
    return type(layer) is nn.Linear and not hooks


def _kind(layer: nn.Module | None) -> tuple[object, ...]:
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all of them, each of which becomes a view of its rows."""
    joint = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, rows in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return joint
