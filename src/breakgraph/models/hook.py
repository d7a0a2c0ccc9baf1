"""The attention function that `transformers` calls, and what it reveals about a model's layers.

No mask function is registered under its name: `transformers` then builds no mask, which would cost a host sync a step.
The name must not contain "sdpa", "flash" or "flex", which `transformers` matches as substrings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from breakgraph.attention import LayerAttention, attend, store
from breakgraph.errors import UnsupportedModelError
from breakgraph.graph.tracing import TracePlace

ATTENTION_NAME = "breakgraph"

_HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "is_causal", "logits_to_keep"})
"""Arguments that change nothing here: positions are in the rotary embedding already, causal is all there is."""

_layers_seen: ContextVar[list[LayerAttention] | None] = ContextVar("breakgraph_layers_seen", default=None)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv] to ([1, T, H, Dv], None)."""
    seen = _layers_seen.get()
    if seen is None:
        return _attend(module.layer_idx, query, key, value)
    seen.append(_describe(module, query, key, value, attention_mask, kwargs))
    return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None


def _attend(
    layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, None]:  # fmt: skip
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    attend(q, k, v, out, layer_id, store(k, v, layer_id))
    return out[None], None


def _traced_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What Dynamo can trace of :func:`_attention`: no context is asked for. Whoever else comes by meanwhile, a thread
    that loads a model above all, gets all of it."""
    if torch.compiler.is_dynamo_compiling():
        return _attend(module.layer_idx, query, key, value)
    return _attention(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION_NAME, _attention)
_place = TracePlace(partial(AttentionInterface.register, ATTENTION_NAME), _attention, _traced_attention)


def hide_attention() -> None:
    """Make Dynamo leave attention alone: it compiles what lies before it and what lies behind it."""
    _place.hide()


def discover_layers(model: PreTrainedModel) -> tuple[LayerAttention, ...]:
    """What each layer's attention needs, seen by running the model on two tokens (on its own device, or "meta").

    Raises:
        UnsupportedModelError: when a layer needs what no implementation has, or attention goes another way.
    """
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    rows = torch.zeros(1, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    name = type(model).__name__
    with _watch_layers() as seen, torch.no_grad():
        try:
            output = model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=rows)
        except UnsupportedModelError:
            raise
        except Exception as error:
            if model.device.type != "meta":
                raise
            raise UnsupportedModelError(
                f"{name} does not run with packed tokens, no mask, no cache and no look at the values of tensors: "
                f"{type(error).__name__}: {error}"
            ) from error
    _check_calls(name, [layer.layer_id for layer in seen], model.config.get_text_config(decoder=True))
    if output.logits.shape[:2] != (1, 1):
        raise UnsupportedModelError(f"{name} ignores logits_to_keep: it computes logits of every row")
    return tuple(sorted(seen, key=lambda layer: layer.layer_id))


@contextmanager
def _watch_layers() -> Iterator[list[LayerAttention]]:
    seen: list[LayerAttention] = []
    token = _layers_seen.set(seen)
    try:
        yield seen
    finally:
        _layers_seen.reset(token)


def _describe(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> LayerAttention:
    name = type(module).__name__
    given = {k: v for k, v in kwargs.items() if v is not None and k not in _HARMLESS and not k.startswith("output_")}
    scale = given.pop("scaling", None)
    layer = LayerAttention(
        layer_id=module.layer_idx,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=float(scale) if scale is not None else query.shape[3] ** -0.5,
        window=given.pop("sliding_window", None),
        softcap=given.pop("softcap", None),
        sinks=given.pop("s_aux", None),
    )
    problem = None
    if attention_mask is not None:
        problem = "it builds an attention mask of its own"
    elif given:
        problem = f"it passes {', '.join(sorted(given))} to attention"
    elif kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        problem = "its attention is not causal"
    elif query.shape[2] != key.shape[2]:
        problem = f"{query.shape[2]} queries meet {key.shape[2]} keys"
    elif query.dtype != key.dtype or key.dtype != value.dtype:
        problem = f"queries, keys and values have dtypes {query.dtype}, {key.dtype}, {value.dtype}"
    if problem is not None:
        raise UnsupportedModelError(f"{name} (layer {module.layer_idx}) needs what is not there yet: {problem}")
    return layer


def _check_calls(name: str, layer_ids: list[int], text_config: Any) -> None:
    if not layer_ids:
        raise UnsupportedModelError(
            f"{name} never calls the attention interface of transformers, so its attention cannot use the paged cache"
        )
    if len(set(layer_ids)) != len(layer_ids):
        raise UnsupportedModelError(f"{name} calls attention more than once in a layer: {layer_ids}")
    num_layers = text_config.num_hidden_layers
    if sorted(layer_ids) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{name} calls attention in layers {sorted(layer_ids)} of {num_layers}; what the others keep between steps "
            "has no place here yet"
        )
