"""Tiny random models of each architecture, sensitive to every term of their attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 96
WINDOW = 6

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GQA = {**_BASE, "num_key_value_heads": 2, "head_dim": 16}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {**_MOE, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}


def _llama() -> PreTrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**_GQA, rope_parameters=rope)


def _gpt_oss() -> PreTrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
    return transformers.GptOssConfig(
        **_GQA, num_local_experts=8, num_experts_per_tok=2, sliding_window=WINDOW, rope_parameters=rope
    )


def _deepseek_v3() -> PreTrainedConfig:
    """Heads are expanded, and values are narrower than keys."""
    return transformers.DeepseekV3Config(
        **_BASE,
        **_ROUTED,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=1,
    )


TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3": lambda: transformers.Qwen3Config(**_GQA),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_GQA, **_MOE, num_experts=8, norm_topk_prob=True),
    "gpt_oss": _gpt_oss,
    "mistral": lambda: transformers.MistralConfig(**_GQA, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **_GQA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GQA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_GQA, **_ROUTED, first_k_dense_replace=1, use_qk_norm=True, partial_rotary_factor=0.5
    ),
}


def tiny_config(name: str) -> PreTrainedConfig:
    """A fresh configuration of one architecture."""
    return TINY_CONFIGS[name]()


def tiny_model(
    name: str, attention: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, experts: str = "batched_mm"
) -> PreTrainedModel:
    """The same weights for every `attention`, large enough that each term of the forward shows in the logits."""
    model = AutoModelForCausalLM.from_config(
        tiny_config(name), attn_implementation=attention, experts_implementation=experts, dtype=dtype
    )
    randomize(model, seed)
    return model.eval()


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
    with torch.no_grad():
        for name, tensor in named:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() >= 2:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif "norm" in name:
                tensor.add_(0.1 * noise)
            else:
                tensor.copy_(0.5 * noise)


def save_tiny_model(name: str, folder: Path, *, seed: int = 0, eos_token_id: int | None = None) -> PreTrainedModel:
    """Writes a tiny model as a folder of config.json and model.safetensors; returns it with eager attention."""
    model = tiny_model(name, "eager", seed=seed)
    model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(folder)
    return model
