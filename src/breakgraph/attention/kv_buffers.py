"""The storage of the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from breakgraph.attention.base import LayerAttention

RESERVED_BLOCK = 0
"""Belongs to no request: padding rows write there, and unused block table entries point there."""


def kv_bytes_per_block(layers: Iterable[LayerAttention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    values_per_token = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in layers)
    return values_per_token * block_size * dtype.itemsize


@dataclass(frozen=True, eq=False)
class KVCacheBuffers:
    """Keys and values of every layer, [num_blocks, block_size, num_kv_heads, head_dim].

    A token's slot is block * block_size + offset. Owned by whoever allocated it; graphs hold its addresses, so it has
    to outlive every plan that was captured on it.
    """

    key: Mapping[int, torch.Tensor]
    value: Mapping[int, torch.Tensor]
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls,
        layers: Iterable[LayerAttention],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCacheBuffers:
        """Zeroed buffers for `layers`."""
        key, value = {}, {}
        for layer in layers:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            key[layer.layer_id] = torch.zeros((*shape, layer.head_dim), dtype=dtype, device=device)
            value[layer.layer_id] = torch.zeros((*shape, layer.v_head_dim), dtype=dtype, device=device)
        return cls(key, value, num_blocks, block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for buffers in (self.key, self.value) for t in buffers.values())

    def assert_contiguous(self) -> None:
        """For kernels that compute addresses from the shapes alone."""
        for layer_id, key in self.key.items():
            dense = key.is_contiguous() and self.value[layer_id].is_contiguous()
            assert dense, f"the cache of layer {layer_id} is not contiguous"

    def write(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k and v [T, num_kv_heads, D] at `slots` [T] int64."""
        self.key[layer_id].flatten(0, 1).index_copy_(0, slots, k)
        self.value[layer_id].flatten(0, 1).index_copy_(0, slots, v)

    def read_blocks(self, layer_id: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of `blocks` [N], in their order: [N * block_size, num_kv_heads, D] each."""
        key = self.key[layer_id].index_select(0, blocks)
        value = self.value[layer_id].index_select(0, blocks)
        return key.flatten(0, 1), value.flatten(0, 1)

    def read_slots(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values at `slots` [N]: [N, num_kv_heads, D] each."""
        key = self.key[layer_id].flatten(0, 1).index_select(0, slots)
        value = self.value[layer_id].flatten(0, 1).index_select(0, slots)
        return key, value
