"""Reasons not to serve a layer that several implementations share, each worded once; None where it does not apply."""

from __future__ import annotations

import torch

from breakgraph.attention.base import LayerAttention


def device_refusal(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"it runs on CUDA, not on {device.type}"


def dtype_refusal(dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Of an implementation that computes in `dtypes`, two or more."""
    if dtype in dtypes:
        return None
    *others, last, refused = (str(each).removeprefix("torch.") for each in (*dtypes, dtype))
    return f"it computes in {', '.join(others)} or {last}, not in {refused}"


def value_size_refusal(layer: LayerAttention) -> str | None:
    if layer.head_dim == layer.v_head_dim:
        return None
    return f"its value heads have the size of its key heads, not {layer.v_head_dim} beside {layer.head_dim}"


def capability_refusal(device: torch.device, minimum: tuple[int, int]) -> str | None:
    """`device`: one that CUDA has."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= minimum:
        return None
    return f"it needs compute capability {minimum[0]}.{minimum[1]}, not {capability[0]}.{capability[1]}"
