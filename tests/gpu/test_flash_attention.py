"""Attention on a CUDA device: flash against sdpa in half precision, both inside captures, and long prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from breakgraph.attention import (
    AttentionBackend,
    AttentionStep,
    KVCacheBuffers,
    LayerAttention,
    RequestTensors,
    attend,
    make_attention,
    use_step,
)
from breakgraph.attention.flash import FlashAttention
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.graph import PlanFamily
from unit.attention.ragged import LAYERS, PLAIN, RaggedBatch, ragged_batch

WIDE = replace(PLAIN, head_dim=128, v_head_dim=128, scale=0.1)
FLASH_LAYERS = {
    "small heads": PLAIN,
    "64": replace(PLAIN, head_dim=64, v_head_dim=64, scale=0.15),
    "128": WIDE,
    "256": replace(PLAIN, head_dim=256, v_head_dim=256, scale=0.06),
    "odd size": replace(PLAIN, head_dim=72, v_head_dim=72, scale=0.12),
    "one head each": replace(WIDE, num_kv_heads=4),
    "one key head": replace(WIDE, num_kv_heads=1),
    "window": replace(WIDE, window=5),
    "window of one": replace(WIDE, window=1),
    "wide window": replace(WIDE, window=64),
}
BATCHES = {
    "prompts": ([60, 1, 33, 100], [0, 0, 0, 0]),
    "prefixes": ([60, 5, 33, 100], [3, 70, 17, 90]),
    "mixed with decodes": ([1, 1, 40, 1], [70, 3, 17, 120]),
    "one request": ([7], [0]),
}
MEAN_TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


def mean_error(batch: RaggedBatch, told: LayerAttention | None = None) -> float:
    """Of flash, against sdpa on the same rounded inputs; `told` is what flash is given for its layer."""
    exact = batch.run(SdpaAttention([batch.layer]))
    got = batch.run(FlashAttention([batch.layer]), told)
    assert got.isfinite().all()
    assert got[batch.live :].eq(0).all()
    return (got.float() - exact.float())[: batch.live].abs().mean().item()


@pytest.mark.parametrize("layer", FLASH_LAYERS.values(), ids=FLASH_LAYERS.keys())
@pytest.mark.parametrize(("q_lens", "cached_lens"), BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_equals_sdpa(
    layer: LayerAttention, q_lens: list[int], cached_lens: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    batch = ragged_batch(layer, q_lens, cached_lens, padding=9, max_blocks=64, dtype=dtype, device=device)
    assert mean_error(batch) < MEAN_TOLERANCE[dtype]


@pytest.mark.parametrize(
    "told",
    [
        replace(FLASH_LAYERS["window"], window=6),
        replace(FLASH_LAYERS["window"], window=4),
        replace(FLASH_LAYERS["window"], window=None),
        replace(FLASH_LAYERS["window"], scale=0.13),
    ],
)
def test_planted_mistakes_are_caught(told: LayerAttention, device: torch.device) -> None:
    q_lens, cached_lens = BATCHES["prefixes"]
    batch = ragged_batch(
        FLASH_LAYERS["window"], q_lens, cached_lens, max_blocks=64, dtype=torch.bfloat16, device=device
    )
    assert mean_error(batch, told) > 4 * MEAN_TOLERANCE[torch.bfloat16]


def test_the_kernel_takes_every_layer_that_is_not_refused(device: torch.device) -> None:
    for layer in (*FLASH_LAYERS.values(), *LAYERS.values()):
        for dtype in (torch.float32, torch.bfloat16):
            if FlashAttention.refusal(layer, device, dtype) is None:
                batch = ragged_batch(layer, [5, 3], [0, 4], dtype=dtype, device=device)
                assert mean_error(batch) < MEAN_TOLERANCE[dtype]


def test_auto_can_be_captured_in_every_phase(device: torch.device) -> None:
    attention = make_attention("auto", device, torch.bfloat16, [WIDE], in_graph=("prefill", "decode"))
    assert attention.graph_support("prefill") == "varlen"
    assert attention.graph_support("decode") in ("decode", "varlen")
    assert attention.for_phase("decode").name == "triton"
    assert isinstance(make_attention("auto", device, torch.float32, [WIDE]), SdpaAttention)


@pytest.mark.parametrize("kind", [FlashAttention, SdpaAttention])
def test_replays_attend_for_their_own_step(kind: type[AttentionBackend], device: torch.device) -> None:
    layer, bucket, dtype = FLASH_LAYERS["window"], 64, torch.bfloat16
    attention = kind([layer])
    captured = ragged_batch(layer, [bucket], [0], dtype=dtype, device=device)
    q, k, v = captured.q, captured.k, captured.v

    def forward() -> torch.Tensor:
        out = q.new_empty(q.shape)
        attend(q * 1.0, k * 1.0, v * 1.0, out, layer.layer_id)
        return out * 2.0

    with torch.inference_mode(), PlanFamily(device) as family:
        attention.bind(captured.kv)
        with use_step(attention.plan(captured.step)):
            plan = family.capture(forward)
        assert plan.num_breaks == 1
        for seed, (q_lens, cached_lens) in enumerate([([64], [0]), ([1, 1, 20], [40, 3, 9]), ([2], [30])]):
            padding = bucket - sum(q_lens)
            batch = ragged_batch(layer, q_lens, cached_lens, padding=padding, dtype=dtype, device=device, seed=seed)
            for mine, new in zip((q, k, v), (batch.q, batch.k, batch.v), strict=True):
                mine.copy_(new)
            attention.bind(batch.kv)
            with use_step(attention.plan(batch.step)):
                family.poison()
                replayed = plan.replay().clone()
                assert torch.equal(replayed, forward())


@pytest.mark.parametrize("name", ["plain", "all at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_full_decode_graph_serves_any_lengths(name: str, dtype: torch.dtype, device: torch.device) -> None:
    layer = LAYERS[name]
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.to(device))
    attention = SdpaAttention([layer])
    batch = ragged_batch(layer, [1] * 4, [0, 3, 1, 2], phase="decode", dtype=dtype, device=device)
    attention.bind(batch.kv)
    q, k, v = batch.q, batch.k, batch.v
    metadata = attention.plan(batch.step)

    def forward() -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        attention.forward(q, k, v, layer, metadata, out)
        return out * 1.0

    with torch.inference_mode(), PlanFamily(device) as family:
        plan = family.capture(forward, breaks=False)
        other = ragged_batch(layer, [1] * 3, [33, 0, 17], padding=1, phase="decode", dtype=dtype, device=device, seed=1)
        for mine, new in zip((q, k, v), (other.q, other.k, other.v), strict=True):
            mine.copy_(new)
        for field in ("seq_lens_gpu", "block_tables_gpu", "slot_mapping_gpu"):
            getattr(batch.step, field).copy_(getattr(other.step, field))
        batch.kv.key[0].copy_(other.kv.key[0])
        batch.kv.value[0].copy_(other.kv.value[0])
        family.poison()
        replayed = plan.replay().clone()
        assert torch.equal(replayed, forward())
        error = (replayed[:3].double() - other.expected()).abs().max().item()
        assert error < (1e-4 if dtype == torch.float32 else 2e-2)


def test_sdpa_prefill_of_a_long_prompt_stays_in_bounded_memory(device: torch.device) -> None:
    """All scores at once would be 8 GiB in float32."""
    num_tokens, block_size, dtype = 8192, 16, torch.bfloat16
    layer = LayerAttention(0, num_heads=32, num_kv_heads=8, head_dim=64, v_head_dim=64, scale=0.125)
    num_blocks = num_tokens // block_size
    requests = RequestTensors(
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
    )
    step = AttentionStep(
        phase="prefill",
        num_tokens=num_tokens,
        padded_num_tokens=num_tokens,
        q_lens=(num_tokens,),
        seq_lens=(num_tokens,),
        slot_mapping_gpu=torch.arange(block_size, num_tokens + block_size, device=device),
        requests=lambda: requests,
    )
    q = torch.randn(num_tokens, 32, 64, device=device, dtype=dtype)
    k, v = (torch.randn(num_tokens, 8, 64, device=device, dtype=dtype) for _ in range(2))
    outs = []
    for kind in (SdpaAttention, FlashAttention):
        attention = kind([layer])
        attention.bind(KVCacheBuffers.allocate([layer], num_blocks + 1, block_size, dtype, device))
        out = torch.full_like(q, torch.nan)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        attention.forward(q, k, v, layer, attention.plan(step), out)
        assert torch.cuda.max_memory_allocated(device) - before < 2 * 2**30
        outs.append(out.float())
    assert (outs[0] - outs[1]).abs().mean() < MEAN_TOLERANCE[dtype]
