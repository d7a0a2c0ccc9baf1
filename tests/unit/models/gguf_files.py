"""A tiny llama as a GGUF file, with a tokenizer of single characters whose end token has id 2."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_models import randomize

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(c) for c in range(ord("!"), ord("~") + 1)][:91]
PAIRS = ["ab", "cd"]
TOKENS = SPECIAL_TOKENS + CHARACTERS + PAIRS
END = 2

CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def write_tiny_gguf(path: Path) -> LlamaForCausalLM:
    """Writes float32 tensors; returns the model that they belong to."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    randomize(model)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * len(CHARACTERS + PAIRS))
    writer.add_token_merges([" ".join(pair) for pair in PAIRS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(0)
    weights = dict(model.named_parameters())
    writer.add_tensor("token_embd.weight", _array(weights["model.embed_tokens.weight"]))
    writer.add_tensor("output_norm.weight", _array(weights["model.norm.weight"]))
    for layer in range(CONFIG["num_hidden_layers"]):
        for short, long in _LAYER_NAMES.items():
            weight = weights[f"model.layers.{layer}.{long}.weight"]
            if short in ("attn_q", "attn_k"):
                weight = _interleave(weight, 4 if short == "attn_q" else 2)
            writer.add_tensor(f"blk.{layer}.{short}.weight", _array(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF rotates neighbouring rows of a head, transformers the two halves."""
    rows, columns = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().contiguous().numpy()
