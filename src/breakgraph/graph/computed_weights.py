"""Weights that a hook of `torch.nn.utils` computes before each call and leaves on the module: what they are called, and
what to use in their place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.utils import prune

_WAYS_OUT = {
    "WeightNorm": (
        "torch.nn.utils.weight_norm",
        "call torch.nn.utils.remove_weight_norm(module{name}), or use torch.nn.utils.parametrizations.weight_norm",
    ),
    "SpectralNorm": (
        "torch.nn.utils.spectral_norm",
        "call torch.nn.utils.remove_spectral_norm(module{name}), or use torch.nn.utils.parametrizations.spectral_norm",
    ),
}
_PRUNED = (
    "torch.nn.utils.prune",
    "make it permanent with torch.nn.utils.prune.remove(module{name}), or multiply by the mask in a parametrization "
    "(torch.nn.utils.parametrize)",
)


class Computed(NamedTuple):
    """Why such a weight cannot be captured, and what to do about it."""

    why: str
    way_out: str


def computed_weight(owner: object, name: str) -> Computed | None:
    """What is told of an attribute that is such a weight; None for another."""
    hooks = owner.__dict__.get("_forward_pre_hooks", {}) if issubclass(type(owner), torch.nn.Module) else {}
    for hook in list(hooks.values()):
        known = _known(hook, name)
        if known is not None:
            by, way_out = known
            why = f"is computed at every call by a forward pre-hook of {by}, which leaves it on the module"
            return Computed(why, way_out)
    return None


def _known(hook: Any, name: str) -> tuple[str, str] | None:
    kind = type(hook)
    if issubclass(kind, prune.BasePruningMethod):
        found, target = _PRUNED, hook._tensor_name
    elif kind.__module__.startswith("torch.nn.utils.") and kind.__name__ in _WAYS_OUT:
        found, target = _WAYS_OUT[kind.__name__], hook.name
    else:
        return None
    by, way_out = found
    return (by, way_out.format(name=f", {name!r}")) if target == name else None
