"""Whether a model can be served, decided from its configuration before any weight is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from breakgraph.attention import LayerAttention
from breakgraph.errors import ConfigError, UnsupportedModelError
from breakgraph.models.hook import ATTENTION_NAME, discover_layers

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MISSING = {
    "chunked_attention": "attention in chunks",
    "deepseek_sparse_attention": "sparse attention: an indexer over the paged cache and its top-k choice of tokens",
    "linear_attention": "linear attention: recurrent state for each sequence",
}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_supported(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[LayerAttention, ...]:
    """Builds the model on the meta device and runs it there; about a second for the largest ones.

    Returns:
        Its layers; the tensors in them are on the meta device.

    Raises:
        UnsupportedModelError: naming what is missing.
        ConfigError: the class cannot be made with these values.
    """
    _check_config(config)
    with torch.device("meta"):
        try:
            model = build_model(config, dtype, experts="batched_mm")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            if error.args == (ATTENTION_NAME,):
                raise UnsupportedModelError(
                    f"model_type {config.model_type!r} picks its attention from a table of its own, not from the "
                    "attention interface of transformers"
                ) from error
            raise ConfigError(
                f"transformers makes no {config.model_type!r} model of this configuration "
                f"({type(error).__name__}: {error}); look at its values"
            ) from error
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps state between steps that is no key or value (recurrent or convolutional); "
            "there is no place for it yet"
        )
    layers = discover_layers(model)
    _check_windows(type(model).__name__, layers, config.get_text_config(decoder=True))
    return layers


def build_model(config: PreTrainedConfig, dtype: torch.dtype, experts: str) -> PreTrainedModel:
    """The model class with fresh weights, on torch's current default device. The configuration is copied.

    Raises:
        UnsupportedModelError: when no causal language model belongs to the configuration.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model of model_type {config.model_type!r}")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=ATTENTION_NAME, experts_implementation=experts
    )
    return model


def has_experts(config: PreTrainedConfig) -> bool:
    """Whether the model's class lets its expert computation be chosen; a dense class refuses any but batched_mm."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = classes[0] if isinstance(classes, tuple) else classes
    return bool(model_class._can_set_experts_implementation())


def _check_config(config: PreTrainedConfig) -> None:
    text_config = config.get_text_config(decoder=True)
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are served")
    unknown = [t for t in dict.fromkeys(getattr(text_config, "layer_types", None) or ()) if t not in _LAYER_TYPES]
    if unknown:
        missing = "; ".join(_MISSING.get(t, f"layers of type {t!r}") for t in unknown)
        raise UnsupportedModelError(f"{name} needs what is not there yet: {missing}")
    for rope_type in _rope_types(getattr(text_config, "rope_parameters", None)):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{name} uses rope type {rope_type!r}: transformers chooses its frequencies by the longest sequence of "
                "the whole batch, so one request would change the answers of others"
            )
    if getattr(text_config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"{name} attends in both directions; only causal models are served")


def _rope_types(parameters: Any) -> Iterator[str]:
    """Of a flat dict, or of one dict a layer type."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters["rope_type"]
    for value in parameters.values():
        yield from _rope_types(value)


def _check_windows(name: str, layers: tuple[LayerAttention, ...], text_config: PreTrainedConfig) -> None:
    """A class that leaves its window to the mask, which is not built here, would attend to everything."""
    window, layer_types = getattr(text_config, "sliding_window", None), getattr(text_config, "layer_types", None)
    if layer_types is None and window is not None and all(layer.window is None for layer in layers):
        raise UnsupportedModelError(f"{name} has a window of {window}, but does not pass it to attention")
    for layer, layer_type in zip(layers, layer_types or (), strict=False):
        if (layer_type == "sliding_attention") != (layer.window is not None):
            raise UnsupportedModelError(
                f"{name}: layer {layer.layer_id} is of type {layer_type!r}, yet it passes window {layer.window}"
            )
