"""Which models are refused, and that the message names what is missing."""

from __future__ import annotations

import pytest
import torch
import transformers

from breakgraph.errors import ConfigError, UnsupportedModelError
from breakgraph.models import check_supported
from breakgraph.models.presets import PRESETS
from breakgraph.models.source import resolve_model
from tiny_models import TINY_CONFIGS, WINDOW, tiny_config, tiny_model

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


def llama_with_rope(rope_type: str, **more: object) -> transformers.LlamaConfig:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, **more}
    return transformers.LlamaConfig(**SMALL, rope_parameters=rope)


def longrope() -> transformers.PreTrainedConfig:
    return llama_with_rope(
        "longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=64
    )


def nested_rope() -> transformers.PreTrainedConfig:
    config = tiny_config("gemma3")
    config.rope_parameters["full_attention"] |= {"rope_type": "dynamic", "factor": 2.0}
    return config


def bidirectional() -> transformers.PreTrainedConfig:
    config = tiny_config("gemma3")
    config.use_bidirectional_attention = True
    return config


REFUSED = {
    "dynamic rope": (lambda: llama_with_rope("dynamic"), "rope type 'dynamic'.*longest sequence of the whole batch"),
    "longrope": (longrope, "rope type 'longrope'"),
    "dynamic rope of one layer type": (nested_rope, "rope type 'dynamic'"),
    "both directions": (bidirectional, "in both directions"),
    "encoder-decoder": (lambda: transformers.BartConfig(), "encoder-decoder"),
    "encoder": (
        lambda: transformers.BertConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2),
        "attention is not causal",
    ),
    "no language model": (lambda: transformers.ViTConfig(), "no causal language model of model_type 'vit'"),
    "attention of its own": (
        lambda: transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4),
        "never calls the attention interface",
    ),
    "table of its own": (
        lambda: transformers.GPTJConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=4, rotary_dim=16),
        "from a table of its own",
    ),
    "chunked attention": (lambda: transformers.Llama4TextConfig(**SMALL), "attention in chunks"),
    "linear attention": (
        lambda: transformers.Qwen3NextConfig(**SMALL, head_dim=16),
        "linear attention: recurrent state",
    ),
    "state space model": (
        lambda: transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8),
        "recurrent state",
    ),
    "recurrent state without layer types": (
        lambda: transformers.RwkvConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, attention_hidden_size=64),
        "keeps state between steps",
    ),
    "attention twice a layer": (
        lambda: transformers.DiffLlamaConfig(**SMALL),
        "more than once in a layer",
    ),
    "a mask of its own": (lambda: transformers.DogeConfig(**SMALL), "attention mask of its own"),
    "a window in the mask only": (
        lambda: transformers.models.moshi.MoshiConfig(**{**SMALL, "num_codebooks": 2}, head_dim=16, sliding_window=4),
        "window of 4, but does not pass it",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_name_what_is_missing(config: object, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_supported(config(), torch.float32)


def test_values_that_make_no_model_are_named() -> None:
    config = transformers.LlamaConfig(**SMALL, hidden_act="nope")
    with pytest.raises(ConfigError, match=r"makes no 'llama' model .*KeyError: 'nope'.*look at its values"):
        check_supported(config, torch.float32)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    config = resolve_model(name, load_format="dummy").config
    if name == "glm-moe-dsa":
        with pytest.raises(UnsupportedModelError, match="sparse attention: an indexer over the paged cache"):
            check_supported(config)
        return
    layers = check_supported(config)
    assert [layer.layer_id for layer in layers] == list(range(config.num_hidden_layers))
    assert {(layer.num_kv_heads, layer.head_dim) for layer in layers} == {(config.num_key_value_heads, config.head_dim)}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_tiny_models_are_supported_and_their_config_is_left_alone(name: str) -> None:
    config = tiny_config(name)
    before = config.to_dict()
    layers = check_supported(config, torch.float32)
    assert config.to_dict() == before
    assert len(layers) == config.num_hidden_layers


def test_what_layers_need_is_seen() -> None:
    gpt_oss = check_supported(tiny_config("gpt_oss"))
    assert [layer.window for layer in gpt_oss] == [WINDOW, None]
    assert [layer.sinks.shape for layer in gpt_oss] == [(4,), (4,)]
    assert {layer.softcap for layer in check_supported(tiny_config("gemma2"))} == {5.0}
    deepseek = check_supported(tiny_config("deepseek_v3"))
    assert {(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in deepseek} == {(4, 24, 12)}


def test_an_argument_nobody_knows_is_refused() -> None:
    model = tiny_model("llama", "breakgraph")
    forward = type(model.model.layers[1].self_attn).forward
    layer = model.model.layers[1].self_attn
    layer.forward = lambda *args, **kwargs: forward(layer, *args, **kwargs, alibi_slopes=torch.ones(4))

    from breakgraph.models.hook import discover_layers

    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention \(layer 1\).*alibi_slopes"):
        discover_layers(model)
