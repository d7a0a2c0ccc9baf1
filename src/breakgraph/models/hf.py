"""A `transformers` causal language model, unedited, driven with packed tokens and our own KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from breakgraph.attention import LayerAttention
from breakgraph.models.hook import discover_layers
from breakgraph.models.source import max_position


class HFModel:
    """Owns the weights; the KV cache belongs to the engine.

    Args:
        module: A model whose attention implementation is the one that hook.py registers. It is put in evaluation mode
            and its parameters take no gradients any more.
        name: What to call it in messages and metrics.
    """

    def __init__(self, module: PreTrainedModel, name: str) -> None:
        self.module = module.eval().requires_grad_(False)
        self.name = name
        self.layers: tuple[LayerAttention, ...] = discover_layers(module)

    @property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @property
    def _text_config(self) -> PreTrainedConfig:
        return self.module.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, hence of the KV cache."""
        return self.module.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        return int(self._text_config.vocab_size)

    @property
    def max_position(self) -> int:
        return max_position(self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text; empty when the checkpoint names none."""
        ids = getattr(self.module.generation_config, "eos_token_id", None)
        if ids is None:
            ids = self._text_config.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def num_bytes(self) -> int:
        """Of the weights and buffers; what is shared counts once."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def kv_cache_shapes(self, block_size: int) -> Mapping[int, tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Shapes of one block's keys and values, [block_size, num_kv_heads, head_dim], by layer."""
        return {
            layer.layer_id: (
                (block_size, layer.num_kv_heads, layer.head_dim),
                (block_size, layer.num_kv_heads, layer.v_head_dim),
            )
            for layer in self.layers
        }

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Logits of the chosen rows of one packed step; call it inside `breakgraph.attention.use_step`.

        Args:
            input_ids: [T] int64.
            positions: [T] int64, counted in each request from 0.
            logits_rows: [R] int64, which of the T rows to compute logits for.

        Returns:
            [R, vocab_size] in the model's dtype.
        """
        output = self.module(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logits_rows
        )
        logits: torch.Tensor = output.logits[0]
        return logits
