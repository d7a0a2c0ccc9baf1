"""The reference attention against float64, its two forms against each other, and what must not reach a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from breakgraph.attention import LayerAttention, sdpa
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.graph import PlanFamily
from unit.attention.ragged import LAYERS, MISTAKES, PLAIN, SINKS, RaggedBatch, ragged_batch

TOLERANCE = 2e-5

_requests = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=5)


def error(batch: RaggedBatch, told: LayerAttention | None = None) -> float:
    out = batch.run(SdpaAttention([batch.layer]), told)[: batch.live]
    return (out.double() - batch.expected()).abs().max().item()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_prefill_chunks_and_decodes_in_one_batch(layer: LayerAttention) -> None:
    batch = ragged_batch(layer, q_lens=[9, 1, 4, 6, 1], cached_lens=[0, 17, 8, 13, 0], padding=3)
    assert error(batch) < TOLERANCE


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("max_blocks", [8, 16], ids=["a full table", "a roomy table"])
def test_decode_reads_lengths_from_the_device(layer: LayerAttention, max_blocks: int) -> None:
    cached_lens = [0, 17, 3, 31, 8, 27, 28]
    batch = ragged_batch(layer, [1] * 7, cached_lens, padding=3, phase="decode", max_blocks=max_blocks)
    assert error(batch) < TOLERANCE


@hypothesis.given(_requests, st.sampled_from(list(LAYERS)), st.integers(0, 9), st.integers(0, 2**31))
@hypothesis.settings(max_examples=25)
def test_any_ragged_batch(requests: list[tuple[int, int]], layer: str, padding: int, seed: int) -> None:
    q_lens, cached_lens = zip(*requests, strict=True)
    assert error(ragged_batch(LAYERS[layer], q_lens, cached_lens, padding=padding, seed=seed)) < TOLERANCE


@hypothesis.given(
    st.lists(st.integers(0, 31), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, SINKS]),
    st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=25)
def test_any_decode_batch(cached_lens: list[int], window: int, sinks: torch.Tensor | None, seed: int) -> None:
    layer = replace(PLAIN, window=window, sinks=sinks)
    batch = ragged_batch(layer, [1] * len(cached_lens), cached_lens, phase="decode", max_blocks=8, seed=seed)
    assert error(batch) < TOLERANCE


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_both_forms_agree(layer: LayerAttention) -> None:
    q_lens, cached_lens = [1, 1, 1, 1], [0, 22, 5, 12]
    attention = SdpaAttention([layer])
    ragged = ragged_batch(layer, q_lens, cached_lens).run(attention)
    decode = ragged_batch(layer, q_lens, cached_lens, phase="decode").run(attention)
    torch.testing.assert_close(decode, ragged, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("layer", "mistake"), MISTAKES)
def test_planted_mistakes_are_caught(
    layer: LayerAttention, mistake: Callable[[LayerAttention], LayerAttention], phase: str
) -> None:
    batch = ragged_batch(layer, q_lens=[1, 1, 1], cached_lens=[12, 20, 9], phase=phase)
    assert error(batch, mistake(layer)) > 10 * TOLERANCE


@pytest.mark.parametrize("layer", ["plain", "window", "all at once"])
def test_chunks_change_nothing(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = {"q_lens": [23, 5], "cached_lens": [3, 14]}
    decode = {"q_lens": [1] * 5, "cached_lens": [0, 17, 3, 31, 8], "phase": "decode"}
    monkeypatch.setattr(sdpa, "MAX_SCORES", 300)
    for arguments in (prefill, decode):
        assert error(ragged_batch(LAYERS[layer], **arguments)) < TOLERANCE


def test_scores_of_a_long_prompt_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "MAX_SCORES", 4096)
    largest = 0
    matmul = torch.matmul

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        result = matmul(a, b)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch, "matmul", watched)
    ragged_batch(PLAIN, q_lens=[200], cached_lens=[0], max_blocks=64).run(SdpaAttention([PLAIN]))
    assert 0 < largest <= 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_half_precision_is_rounded_only_at_its_ends(dtype: torch.dtype, phase: str) -> None:
    batch = ragged_batch(PLAIN, q_lens=[1, 1], cached_lens=[30, 11], phase=phase, dtype=dtype)
    out = batch.run(SdpaAttention([PLAIN]))
    torch.testing.assert_close(out, batch.expected().to(dtype), rtol=0, atol=torch.finfo(dtype).eps)


def test_prefill_padding_rows_are_zero_and_write_nothing() -> None:
    batch = ragged_batch(PLAIN, q_lens=[3, 2], cached_lens=[0, 5], padding=4)
    out = batch.run(SdpaAttention([PLAIN]))
    assert out[batch.live :].eq(0).all()
    assert batch.kv.key[0][0].eq(0).all()


def test_decode_padding_rows_are_finite_whatever_their_lengths() -> None:
    batch = ragged_batch(LAYERS["all at once"], [1, 1], [4, 9], padding=3, phase="decode")
    batch.step.seq_lens_gpu[-1] = 0
    out = batch.run(SdpaAttention([batch.layer]))
    assert out.isfinite().all()
    assert out[-1].eq(0).all()


def test_only_own_slots_and_the_reserved_block_are_written() -> None:
    batch = ragged_batch(PLAIN, [1, 1], [4, 9], padding=3, phase="decode")
    before = batch.kv.key[0].clone()
    batch.run(SdpaAttention([PLAIN]))
    changed = (~torch.isclose(before, batch.kv.key[0], equal_nan=True)).flatten(0, 1).any(-1).any(-1).nonzero()
    assert set(changed.flatten().tolist()) <= set(batch.step.slot_mapping_gpu.tolist())


@pytest.mark.parametrize("layer", ["plain", "all at once"])
def test_one_decode_graph_serves_any_lengths_bit_for_bit(layer: str) -> None:
    attention = SdpaAttention([LAYERS[layer]])
    batch = ragged_batch(LAYERS[layer], [1] * 4, [0, 3, 1, 2], phase="decode")
    attention.bind(batch.kv)
    q, k, v = batch.q, batch.k, batch.v
    metadata = attention.plan(batch.step)

    def forward() -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], batch.layer.v_head_dim)
        attention.forward(q, k, v, batch.layer, metadata, out)
        return out

    with PlanFamily("cpu") as family:
        plan = family.capture(forward, breaks=False)
        other = ragged_batch(LAYERS[layer], [1] * 3, [33, 0, 17], padding=1, phase="decode", seed=1)
        for mine, new in zip((q, k, v), (other.q, other.k, other.v), strict=True):
            mine.copy_(new)
        for name in ("seq_lens_gpu", "block_tables_gpu", "slot_mapping_gpu"):
            getattr(batch.step, name).copy_(getattr(other.step, name))
        batch.kv.key[0].copy_(other.kv.key[0])
        batch.kv.value[0].copy_(other.kv.value[0])
        family.poison()
        replayed = plan.replay().clone()
        assert torch.equal(replayed, forward())
        torch.testing.assert_close(replayed[:3].double(), other.expected(), rtol=0, atol=TOLERANCE)


def test_sinks_take_probability_from_everybody() -> None:
    batch = ragged_batch(replace(PLAIN, sinks=torch.full_like(SINKS, 30.0)), [4], [0])
    assert batch.run(SdpaAttention([batch.layer])).abs().max() < 1e-6


def test_what_a_plan_needs() -> None:
    attention = SdpaAttention([PLAIN])
    batch = ragged_batch(PLAIN, [2], [0])
    with pytest.raises(AssertionError, match="needs the host lengths"):
        attention.plan(replace(batch.step, q_lens=(), seq_lens=()))
    with pytest.raises(AssertionError, match="one new token a request"):
        attention.plan(replace(batch.step, phase="decode"))
    with pytest.raises(AssertionError, match="1 block table rows for 2 decode rows"):
        attention.plan(replace(batch.step, phase="decode", q_lens=(), seq_lens=()))
    with pytest.raises(RuntimeError, match="no KV cache yet"):
        attention.forward(batch.q, batch.k, batch.v, PLAIN, attention.plan(batch.step), batch.q)
