"""The cache's storage: shapes, slots, and its price."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from breakgraph.attention import KVCacheBuffers
from breakgraph.attention.kv_buffers import kv_bytes_per_block
from unit.attention.ragged import PLAIN

LAYERS = [PLAIN, replace(PLAIN, layer_id=1, num_kv_heads=1, head_dim=8, v_head_dim=4)]


def test_each_layer_has_its_own_shape_and_starts_at_zero() -> None:
    kv = KVCacheBuffers.allocate(LAYERS, 5, 4, torch.bfloat16, "cpu")
    assert [tuple(kv.key[i].shape) for i in (0, 1)] == [(5, 4, 2, 16), (5, 4, 1, 8)]
    assert [tuple(kv.value[i].shape) for i in (0, 1)] == [(5, 4, 2, 16), (5, 4, 1, 4)]
    assert all(not t.any() for t in (*kv.key.values(), *kv.value.values()))


def test_the_price_of_a_block_is_what_it_takes() -> None:
    kv = KVCacheBuffers.allocate(LAYERS, 5, 4, torch.bfloat16, "cpu")
    assert kv.num_bytes == 5 * kv_bytes_per_block(LAYERS, 4, torch.bfloat16) == 5 * 4 * 2 * (2 * 32 + 12)


def test_slots_count_through_the_blocks() -> None:
    kv = KVCacheBuffers.allocate([PLAIN], 5, 4, torch.float32, "cpu")
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    slots = torch.tensor([2 * 4 + 3, 4 * 4, 1 * 4 + 1])
    kv.write(0, slots, k, v)
    assert torch.equal(kv.key[0][2, 3], k[0])
    assert torch.equal(kv.value[0][4, 0], v[1])
    assert kv.key[0].count_nonzero() == k.numel()
    assert all(torch.equal(got, want) for got, want in zip(kv.read_slots(0, slots), (k, v), strict=True))
    keys, values = kv.read_blocks(0, torch.tensor([4, 2], dtype=torch.int32))
    assert torch.equal(keys[[7, 0]], k[:2])
    assert torch.equal(values[[7, 0]], v[:2])


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_layer_whose_storage_has_gaps_is_named(which: str) -> None:
    kv = KVCacheBuffers.allocate(LAYERS, 5, 4, torch.float32, "cpu")
    kv.assert_contiguous()
    buffers = getattr(kv, which)
    gapped = replace(kv, **{which: {**buffers, 1: buffers[1][..., ::2]}})
    with pytest.raises(AssertionError, match="cache of layer 1 is not contiguous"):
        gapped.assert_contiguous()
