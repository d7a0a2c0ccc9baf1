"""Paged attention in Triton against float64, and what must not reach a row.

On a machine with a GPU the kernels are compiled for it; elsewhere Triton's interpreter runs them (tests/conftest.py),
which has no bfloat16 and takes milliseconds a tile: few tokens a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from breakgraph.attention import (
    AttentionStep,
    KVCacheBuffers,
    LayerAttention,
    attend,
    make_attention,
    store,
    triton_ops,
    use_step,
)
from breakgraph.attention.triton import TritonAttention
from breakgraph.attention.triton_ops import Tile
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily
from triton_device import DEVICE
from unit.attention.ragged import LAYERS, MISTAKES, PLAIN, SINKS, RaggedBatch, ragged_batch, with_changes

ON_GPU = DEVICE.type == "cuda"
HALF = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = {"q_lens": [9, 1, 4, 6, 1], "cached_lens": [0, 17, 8, 13, 0]}
DECODE = {"q_lens": [1] * 7, "cached_lens": [0, 17, 3, 31, 8, 27, 28], "phase": "decode"}
LONG = {"q_lens": [20, 1, 9], "cached_lens": [0, 46, 30]}
LONG_DECODE = {"q_lens": [1] * 4, "cached_lens": [63, 0, 15, 40], "phase": "decode"}


def on_device(layer: LayerAttention) -> LayerAttention:
    return layer if layer.sinks is None else replace(layer, sinks=layer.sinks.to(DEVICE))


def batch_of(layer: LayerAttention, *, dtype: torch.dtype = torch.float32, **arguments: object) -> RaggedBatch:
    return ragged_batch(on_device(layer), dtype=dtype, device=DEVICE, **arguments)


def run(batch: RaggedBatch, told: LayerAttention | None = None) -> torch.Tensor:
    return batch.run(TritonAttention([batch.layer]), told)


def error(batch: RaggedBatch, told: LayerAttention | None = None) -> float:
    """In units of what the dtype may be off by; NaN is never below 1."""
    out = run(batch, told)[: batch.live]
    worst = (out.double() - batch.expected()).abs().max().item()
    return worst / TOLERANCE[out.dtype]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a request where there are few tokens: masked ones at both ends, whole ones between, splits."""
    monkeypatch.setattr(triton_ops, "varlen_tile", lambda *key: Tile(16, 16, 4, 2))
    monkeypatch.setattr(triton_ops, "decode_tile", lambda *key: Tile(16, 16, 4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_prefill_chunks_and_decodes_in_one_batch(layer: LayerAttention, dtype: torch.dtype) -> None:
    assert error(batch_of(layer, **MIXED, padding=3, dtype=dtype)) < 1


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_decode(layer: LayerAttention, dtype: torch.dtype) -> None:
    assert error(batch_of(layer, **DECODE, padding=3, dtype=dtype)) < 1


@pytest.mark.parametrize(("phase", "batch"), [("prefill", LONG), ("decode", LONG_DECODE)], ids=["prefill", "decode"])
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40])
@pytest.mark.usefixtures("small_tiles")
def test_tiles_meet_windows_and_ends(window: int | None, phase: str, batch: dict[str, object]) -> None:
    layer = replace(PLAIN, window=window, softcap=3.0)
    assert error(batch_of(layer, **batch)) < 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    [(2, 2, 64, 64), (4, 1, 80, 80), (8, 1, 128, 128), (6, 2, 96, 64), (16, 1, 192, 128), (20, 1, 64, 96)],
)
def test_head_counts_and_sizes(num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, phase: str) -> None:
    layer = LayerAttention(0, num_heads, num_kv_heads, head_dim, v_head_dim, scale=head_dim**-0.5)
    q_lens, cached_lens = ([1, 1, 1], [20, 0, 6]) if phase == "decode" else ([9, 3], [8, 0])
    assert error(batch_of(layer, q_lens=q_lens, cached_lens=cached_lens, phase=phase, dtype=HALF)) < 1


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.usefixtures("small_tiles")
def test_block_sizes(block_size: int) -> None:
    for batch in (LONG, LONG_DECODE):
        assert error(batch_of(PLAIN, **batch, block_size=block_size, dtype=HALF)) < 1


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(1, 50)),
    st.sampled_from([None, SINKS]),
    st.integers(0, 5),
    st.integers(0, 2**31),
)
@hypothesis.settings(max_examples=5, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_tiles")
def test_any_ragged_batch(
    requests: list[tuple[int, int]], window: int | None, sinks: torch.Tensor | None, padding: int, seed: int
) -> None:
    q_lens, cached_lens = zip(*requests, strict=True)
    layer = replace(PLAIN, window=window, sinks=sinks)
    assert error(batch_of(layer, q_lens=q_lens, cached_lens=cached_lens, padding=padding, seed=seed)) < 1
    decode = batch_of(layer, q_lens=[1] * len(q_lens), cached_lens=cached_lens, phase="decode", seed=seed)
    assert error(decode) < 1


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
@pytest.mark.parametrize("layer", ["plain", "window", "all at once"])
@pytest.mark.usefixtures("small_tiles")
def test_any_number_of_splits(splits: int, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "num_splits", lambda *shape: splits)
    batch = batch_of(LAYERS[layer], **LONG_DECODE, padding=2)
    assert error(batch) < 1
    merged_in_decode = run(batch)
    monkeypatch.setattr(triton_ops, "MERGE_IN_DECODE", False)
    assert torch.equal(run(batch)[: batch.live], merged_in_decode[: batch.live])


@pytest.mark.parametrize("num_heads", [1, 6, 24])
@pytest.mark.usefixtures("small_tiles")
def test_splits_of_any_group_merge(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "num_splits", lambda *shape: 4)
    monkeypatch.setattr(triton_ops, "decode_tile", lambda *key: Tile(32, 16, 4, 2))
    monkeypatch.setattr(triton_ops, "_MERGE_ELEMENTS", 256)
    layer = LayerAttention(0, num_heads, 1, 64, 96, scale=0.125)
    assert error(batch_of(layer, **LONG_DECODE)) < 1


@pytest.mark.usefixtures("small_tiles")
def test_counters_start_and_end_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "num_splits", lambda *shape: 4)
    batch = batch_of(PLAIN, **LONG_DECODE)
    step, cache = batch.step, (batch.kv.key[0], batch.kv.value[0])
    arrivals = torch.full((batch.live, PLAIN.num_kv_heads), 7, dtype=torch.int32, device=DEVICE)
    triton_ops.store(batch.k, batch.v, step.slot_mapping_gpu, None, *cache, arrivals)
    assert arrivals.eq(0).all()
    out = torch.empty_like(batch.q)
    tables, lens = step.block_tables_gpu, step.seq_lens_gpu
    for _ in range(2):
        out.fill_(torch.nan)
        triton_ops.decode(batch.q, *cache, tables, lens, arrivals, None, PLAIN.scale, None, None, out)
        assert arrivals.eq(0).all()
        assert (out.double() - batch.expected()).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("layer", ["plain", "all at once"])
def test_a_bound_call_attends_for_every_step_and_for_the_cache_of_now(layer: str) -> None:
    told = on_device(LAYERS[layer])
    told = told if told.sinks is None else replace(told, sinks=told.sinks.clone())
    attention = TritonAttention([told])
    call = None
    for seed, (q_lens, cached_lens) in enumerate([([9], [0]), ([1, 1, 5, 2], [20, 3, 9, 2]), ([4, 5], [30, 0])]):
        if told.sinks is not None:
            told.sinks.data = torch.randn_like(told.sinks)  # elsewhere, as when weights are exchanged
        batch = batch_of(told, q_lens=q_lens, cached_lens=cached_lens, dtype=HALF, seed=seed)
        attention.bind(batch.kv)
        if call is None:
            q, out = batch.q.clone(), torch.empty(*batch.q.shape[:2], batch.layer.v_head_dim, dtype=HALF, device=DEVICE)
            call = attention.bound(q, batch.k, batch.v, batch.layer, out, stored=True)
        cache = batch.kv.key[batch.layer.layer_id], batch.kv.value[batch.layer.layer_id]
        triton_ops.store(batch.k, batch.v, batch.step.slot_mapping_gpu, None, *cache)
        q.copy_(batch.q)
        out.fill_(torch.nan)
        call(attention.plan(batch.step))
        assert (out.double() - batch.expected()).abs().max() < TOLERANCE[HALF]


def test_a_bound_call_is_that_of_a_subclass() -> None:
    class Negated(TritonAttention):
        def forward(self, *args: object, **kwargs: object) -> None:
            super().forward(*args, **kwargs)  # type: ignore[arg-type]
            args[5].neg_()  # type: ignore[attr-defined]

    batch = batch_of(PLAIN, q_lens=[3, 2], cached_lens=[0, 4])
    outs = []
    for kind in (TritonAttention, Negated):
        attention, out = kind([PLAIN]), torch.empty_like(batch.q)
        attention.bind(batch.kv)
        triton_ops.store(batch.k, batch.v, batch.step.slot_mapping_gpu, None, batch.kv.key[0], batch.kv.value[0])
        attention.bound(batch.q, batch.k, batch.v, PLAIN, out, stored=True)(attention.plan(batch.step))
        outs.append(out)
    assert torch.equal(outs[0], -outs[1])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.usefixtures("small_tiles")
def test_a_sink_far_above_all_scores_leaves_nothing(phase: str) -> None:
    layer = replace(PLAIN, sinks=torch.full((4,), 200.0))
    out = run(batch_of(layer, q_lens=[1, 1], cached_lens=[50, 3], phase=phase))
    assert out.abs().max() < 1e-6


def test_the_number_of_splits_fills_the_device_in_whole_rounds() -> None:
    def splits(rows: int, num_keys: int, num_kv_heads: int = 8) -> int:
        return triton_ops.num_splits(rows, num_kv_heads, num_keys, 132, 3, Tile(16, 64, 4, 3, min_tiles=4))

    assert splits(1, 100) == 1
    assert splits(1, 4096) == 16
    assert splits(8, 1024) == 4
    assert splits(16, 2048) == 2
    assert splits(32, 2048) == 1  # 256 programs at a time, of 396 that fit
    assert splits(64, 8192) == 3  # 1536 programs, four rounds; 512 would leave a third of the second
    assert splits(1024, 1 << 20) == 1
    assert splits(1, 1 << 20, num_kv_heads=1) == triton_ops.MAX_SPLITS


def test_programs_that_fit_a_multiprocessor() -> None:
    device = triton_ops._Device(num_sms=132, shared_bytes=228 * 1024, large=True)
    for num_stages, fit in ((2, 4), (3, 3), (4, 2)):  # registers end the first, shared memory the others
        assert device.resident(Tile(16, 64, 4, num_stages), 256, torch.bfloat16) == fit
    assert replace(device, shared_bytes=1).resident(Tile(16, 64, 4, 3), 256, torch.bfloat16) == 1


@pytest.mark.parametrize("layer", ["plain", "all at once"])
@pytest.mark.usefixtures("small_tiles")
def test_no_bit_depends_on_the_other_requests(layer: str) -> None:
    q_lens, cached_lens = LONG["q_lens"], LONG["cached_lens"]
    together = batch_of(LAYERS[layer], **LONG)
    out = run(together).split(q_lens)
    starts = [sum(q_lens[:i]) for i in range(len(q_lens))]
    for index, (start, num_new, num_cached) in enumerate(zip(starts, q_lens, cached_lens, strict=True)):
        step, rows = together.step, slice(start, start + num_new)
        alone = with_changes(
            step,
            num_tokens=num_new,
            padded_num_tokens=num_new,
            q_lens=(num_new,),
            seq_lens=(num_new + num_cached,),
            cu_seqlens_q_gpu=torch.tensor([0, num_new], dtype=torch.int32, device=DEVICE),
            seq_lens_gpu=step.seq_lens_gpu[index : index + 1].clone(),
            block_tables_gpu=step.block_tables_gpu[index : index + 1].clone(),
            slot_mapping_gpu=step.slot_mapping_gpu[rows].clone(),
        )
        batch = replace(together, step=alone, q=together.q[rows], k=together.k[rows], v=together.v[rows])
        assert torch.equal(run(batch), out[index])


@pytest.mark.parametrize("layer", ["plain", "all at once"])
@pytest.mark.usefixtures("small_tiles")
def test_no_bit_of_a_decode_row_depends_on_the_other_rows(layer: str) -> None:
    batch = batch_of(LAYERS[layer], **LONG_DECODE)
    out = run(batch)
    for row in range(batch.live):
        lens = torch.ones_like(batch.step.seq_lens_gpu)
        tables = torch.zeros_like(batch.step.block_tables_gpu)
        lens[row], tables[row] = batch.step.seq_lens_gpu[row], batch.step.block_tables_gpu[row]
        alone = replace(batch, step=with_changes(batch.step, seq_lens_gpu=lens, block_tables_gpu=tables))
        assert torch.equal(run(alone)[row], out[row])


@pytest.mark.parametrize("num_sentinels", [1, 4, 260])
def test_sentinels_change_nothing(num_sentinels: int) -> None:
    batch = batch_of(replace(LAYERS["window"], num_kv_heads=1), **MIXED, padding=5)
    out = run(batch)
    step = batch.step
    ends = step.cu_seqlens_q_gpu[-1:].expand(num_sentinels)
    batch.step = with_changes(
        step,
        cu_seqlens_q_gpu=torch.cat([step.cu_seqlens_q_gpu, ends]),
        seq_lens_gpu=torch.cat([step.seq_lens_gpu, step.seq_lens_gpu.new_zeros(num_sentinels)]),
        block_tables_gpu=torch.cat(
            [step.block_tables_gpu, step.block_tables_gpu.new_zeros(num_sentinels, step.block_tables_gpu.shape[1])]
        ),
    )
    again = run(batch)
    assert torch.equal(again, out)
    assert again[batch.live :].eq(0).all()


def test_rows_of_a_request_without_length_are_zero() -> None:
    batch = batch_of(PLAIN, q_lens=[3, 4], cached_lens=[2, 0], padding=2)
    batch.step.seq_lens_gpu[1] = 0
    out = run(batch)
    assert out[3:].eq(0).all()
    assert out[:3].ne(0).all()


def test_a_step_of_padding_alone_is_zero() -> None:
    batch = batch_of(PLAIN, q_lens=[], cached_lens=[], padding=4)
    assert run(batch).eq(0).all()


def test_prefill_padding_rows_are_zero_and_write_nothing() -> None:
    batch = batch_of(PLAIN, q_lens=[3, 2], cached_lens=[0, 5], padding=70)
    out = run(batch)
    assert out[batch.live :].eq(0).all()
    assert batch.kv.key[0][0].eq(0).all()


def test_decode_padding_rows_are_finite_whatever_their_lengths() -> None:
    batch = batch_of(LAYERS["all at once"], q_lens=[1, 1], cached_lens=[4, 9], padding=3, phase="decode")
    batch.step.seq_lens_gpu[-1] = 0
    out = run(batch)
    assert out.isfinite().all()
    assert out[-1].eq(0).all()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_own_slots_and_the_reserved_block_are_written(phase: str) -> None:
    batch = batch_of(PLAIN, q_lens=[1, 1], cached_lens=[4, 9], padding=3, phase=phase)
    before = batch.kv.key[0].clone()
    run(batch)
    changed = (~torch.isclose(before, batch.kv.key[0], equal_nan=True)).flatten(0, 1).any(-1).any(-1).nonzero()
    assert set(batch.step.slot_mapping_gpu[:2].tolist()) <= set(changed.flatten().tolist())
    assert set(changed.flatten().tolist()) <= set(batch.step.slot_mapping_gpu.tolist())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("layer", "mistake"), MISTAKES)
def test_planted_mistakes_are_caught(
    layer: LayerAttention, mistake: Callable[[LayerAttention], LayerAttention], phase: str
) -> None:
    batch = batch_of(layer, q_lens=[1, 1, 1], cached_lens=[12, 20, 9], phase=phase)
    assert error(batch, mistake(on_device(layer))) > 10


def test_slices_of_one_projection_are_taken_as_they_are() -> None:
    batch = batch_of(PLAIN, **MIXED, padding=3)
    heads = [tensor.shape[1] for tensor in (batch.q, batch.k, batch.v)]
    fused = torch.cat([batch.q, batch.k, batch.v], dim=1)
    batch.q, batch.k, batch.v = fused.split(heads, dim=1)
    assert error(batch) < 1
    batch.q = batch.q.transpose(1, 2).contiguous().transpose(1, 2)  # columns apart
    assert error(batch) < 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_graph_serves_any_lengths_bit_for_bit(phase: str) -> None:
    layer = on_device(LAYERS["all at once"])
    attention = TritonAttention([layer])
    bucket = 4 if phase == "decode" else 12

    def filled(q_lens: list[int], cached_lens: list[int], seed: int) -> RaggedBatch:
        batch = batch_of(
            layer, q_lens=q_lens, cached_lens=cached_lens, padding=bucket - sum(q_lens), phase=phase, seed=seed
        )
        return batch if phase == "decode" else replace(batch, step=with_slots(batch.step, 4))

    captured = filled([1] * 4 if phase == "decode" else [12], [0, 3, 1, 2] if phase == "decode" else [0], 0)
    attention.bind(captured.kv)
    q, k, v = captured.q, captured.k, captured.v
    metadata = attention.plan(captured.step)

    def forward() -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        attention.forward(q, k, v, layer, metadata, out)
        return out * 1.0

    steps = (
        [([1] * 3, [33, 0, 17]), ([1], [40])]
        if phase == "decode"
        else [([5, 1, 2], [0, 30, 9]), ([1] * 4, [7, 0, 2, 31])]
    )
    with torch.inference_mode(), PlanFamily(DEVICE) as family:
        plan = family.capture(forward, breaks=False)
        for seed, (q_lens, cached_lens) in enumerate(steps, start=1):
            other = filled(q_lens, cached_lens, seed)
            for mine, new in zip((q, k, v), (other.q, other.k, other.v), strict=True):
                mine.copy_(new)
            for name in ("seq_lens_gpu", "block_tables_gpu", "slot_mapping_gpu", "cu_seqlens_q_gpu"):
                mine, new = getattr(captured.step, name), getattr(other.step, name)
                if phase != "decode" or name != "cu_seqlens_q_gpu":
                    mine.copy_(new)
            captured.kv.key[0].copy_(other.kv.key[0])
            captured.kv.value[0].copy_(other.kv.value[0])
            family.poison()
            replayed = plan.replay().clone()
            # Padding rows of a decode step all write the reserved slot, and read back whichever write came last.
            rows = other.live if phase == "decode" else bucket
            assert torch.equal(replayed[:rows], forward()[:rows])
            error = (replayed[: other.live].double() - other.expected()).abs().max().item()
            assert error < TOLERANCE[torch.float32]


def test_keys_are_stored_in_the_segment_and_read_in_the_break() -> None:
    layer, bucket = on_device(LAYERS["all at once"]), 12
    attention = TritonAttention([layer])

    def filled(q_lens: list[int], cached_lens: list[int], seed: int) -> RaggedBatch:
        batch = batch_of(layer, q_lens=q_lens, cached_lens=cached_lens, padding=bucket - sum(q_lens), seed=seed)
        live = torch.tensor([sum(q_lens)], dtype=torch.int32, device=DEVICE)
        return replace(batch, step=replace(batch.step, num_tokens_gpu=live))

    captured = filled([12], [0], 0)
    attention.bind(captured.kv)
    q, k, v = captured.q, captured.k, captured.v

    def forward() -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        doubled = k * 2
        attend(q, doubled, v, out, layer.layer_id, store(doubled, v, layer.layer_id))
        return out * 1.0

    with torch.inference_mode(), PlanFamily(DEVICE) as family:
        with use_step(attention.plan(captured.step)):
            plan = family.capture(forward)
        for seed, (q_lens, cached_lens) in enumerate([([5, 1, 2], [0, 30, 9]), ([1] * 4, [7, 0, 2, 31])], start=1):
            other = filled(q_lens, cached_lens, seed)
            for mine, new in zip((q, k, v), (other.q, other.k / 2, other.v), strict=True):
                mine.copy_(new)
            for name in ("slot_mapping_gpu", "num_tokens_gpu"):
                getattr(captured.step, name).copy_(getattr(other.step, name))
            captured.kv.key[0].copy_(other.kv.key[0])
            captured.kv.value[0].copy_(other.kv.value[0])
            # Lengths and tables are new tensors in every step, and only the break sees them.
            step = replace(other.step, slot_mapping_gpu=captured.step.slot_mapping_gpu)
            reserved = captured.kv.key[0][0].clone()
            family.poison()
            with use_step(attention.plan(step)):
                replayed = plan.replay()
            error = (replayed[: other.live].double() - other.expected()).abs().max().item()
            assert error < TOLERANCE[torch.float32]
            assert not replayed[other.live :].any()
            assert torch.equal(captured.kv.key[0][0], reserved)  # padding stores nothing
        assert plan.explain().num_breaks == 1


@pytest.mark.parametrize("change", [{"num_tokens_gpu": None}, {"fixed_slots": True}, {"phase": "decode"}], ids=str)
def test_keys_are_left_to_the_break_where_rows_are_not_static_or_a_graph_holds_all(change: dict[str, object]) -> None:
    batch = batch_of(PLAIN, q_lens=[1, 1], cached_lens=[3, 5])
    attention = TritonAttention([PLAIN])
    attention.bind(batch.kv)
    live = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    step = with_changes(batch.step, **{"num_tokens_gpu": live, **change})
    before = batch.kv.key[0].clone()
    with use_step(attention.plan(step)):
        assert store(batch.k, batch.v, 0) is False
    assert torch.equal(batch.kv.key[0].nan_to_num(), before.nan_to_num())


def with_slots(step: AttentionStep, num_slots: int) -> AttentionStep:
    """A prefill step with sentinels up to `num_slots` requests."""
    missing = num_slots - step.seq_lens_gpu.shape[0]
    starts = step.cu_seqlens_q_gpu
    return with_changes(
        step,
        cu_seqlens_q_gpu=torch.cat([starts, starts[-1:].expand(missing)]),
        seq_lens_gpu=torch.nn.functional.pad(step.seq_lens_gpu, (0, missing)),
        block_tables_gpu=torch.nn.functional.pad(step.block_tables_gpu, (0, 0, 0, missing)),
    )


def test_captures_hold_what_the_kernels_read() -> None:
    layer = on_device(LAYERS["sinks"])
    batch = batch_of(layer, q_lens=[1, 1], cached_lens=[3, 5], phase="decode")
    attention = TritonAttention([layer])
    attention.bind(batch.kv)
    metadata = attention.plan(batch.step)
    out = torch.zeros_like(batch.q)
    read = [*batch.kv.key.values(), *batch.kv.value.values(), batch.step.seq_lens_gpu, batch.step.block_tables_gpu]
    with torch.inference_mode(), PlanFamily(DEVICE) as family:
        plan = family.capture(lambda: attention.forward(batch.q, batch.k, batch.v, layer, metadata, out), breaks=False)
        assert plan.explain().pinned_bytes >= sum(tensor.nbytes for tensor in [*read, layer.sinks])


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(layer: LayerAttention, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
        return TritonAttention.refusal(layer, torch.device(device), dtype) or ""

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for layer in LAYERS.values():
        assert reason(layer) == ""
    assert "head sizes go up to 256, not 320" in reason(replace(PLAIN, v_head_dim=320))
    assert "float16, bfloat16 or float32, not in float64" in reason(PLAIN, dtype=torch.float64)
    assert "not 6 for 4" in reason(replace(PLAIN, num_heads=6, num_kv_heads=4))
    assert "at most 128, not 256 for 1" in reason(replace(PLAIN, num_heads=256, num_kv_heads=1))
    assert "its scale is positive, not 0.0" in reason(replace(PLAIN, scale=0.0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0, not 7.5" in reason(PLAIN)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert "on CUDA, not on cpu" in reason(PLAIN, device="cpu")


def test_a_block_size_that_is_no_power_of_two_is_refused() -> None:
    attention = TritonAttention([PLAIN])
    with pytest.raises(ConfigError, match=r"power of two, not 12; change block_size, or use attention='sdpa'"):
        attention.bind(KVCacheBuffers.allocate([PLAIN], 4, 12, torch.float32, DEVICE))


def test_what_a_plan_needs() -> None:
    attention = TritonAttention([PLAIN])
    batch = batch_of(PLAIN, q_lens=[2], cached_lens=[0])
    with pytest.raises(AssertionError, match="needs cu_seqlens_q_gpu"):
        attention.plan(with_changes(batch.step, cu_seqlens_q_gpu=None))
    with pytest.raises(AssertionError, match="one new token a request"):
        attention.plan(replace(batch.step, phase="decode"))
    with pytest.raises(AssertionError, match="1 block table rows for 2 decode rows"):
        attention.plan(replace(batch.step, phase="decode", q_lens=(), seq_lens=()))
    with pytest.raises(AssertionError, match=r"of \(1, 2, 1\) requests"):
        attention.plan(with_changes(batch.step, seq_lens_gpu=batch.step.seq_lens_gpu.repeat(2)))
    with pytest.raises(RuntimeError, match="no KV cache yet"):
        attention.forward(batch.q, batch.k, batch.v, PLAIN, attention.plan(batch.step), batch.q)


def test_full_graphs_may_hold_it_in_every_phase() -> None:
    attention = make_attention("triton", DEVICE, HALF, [PLAIN])
    assert isinstance(attention, TritonAttention)
    assert [attention.graph_support(phase) for phase in ("prefill", "decode", "verify")] == [
        "varlen",
        "decode",
        "varlen",
    ]


def test_requests_that_are_taken_to_be_short_are_cut_into_smaller_tiles() -> None:
    tiles = [triton_ops.varlen_tile(256, 8, torch.bfloat16, True, rows, True) for rows in (4096, 128, 64, 15)]
    assert [tile.block_m for tile in tiles] == [64, 64, 64, 32]
    assert tiles[-1] == triton_ops.varlen_tile(256, 8, torch.bfloat16, True, 15)
    for key in [(512, 8, torch.bfloat16, True), (256, 71, torch.bfloat16, True), (256, 8, torch.bfloat16, False)]:
        assert triton_ops.varlen_tile(*key, 4096, True) == triton_ops.varlen_tile(*key)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_what_it_takes_requests_for_gets_to_the_kernel(
    short: bool, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, batch = set(), batch_of(PLAIN, q_lens=[3, 1], cached_lens=[5, 9])
    tile_of = triton_ops.varlen_tile
    monkeypatch.setattr(triton_ops, "varlen_tile", lambda *key: seen.add(key[-1]) or tile_of(*key))
    attention = TritonAttention([PLAIN], short=short)
    batch.run(attention)
    metadata = attention.plan(batch.step)
    attention.forward(batch.q, batch.k, batch.v, PLAIN, metadata, torch.empty_like(batch.q), stored=stored)
    assert seen == {short}


def test_few_rows_are_cut_into_smaller_tiles() -> None:
    """Of bfloat16 heads of 128, where a tile of 128 rows would leave multiprocessors idle."""
    sizes = [triton_ops.varlen_tile(256, 8, torch.bfloat16, True, rows).block_m for rows in (4096, 128, 127.9, 64, 15)]
    assert sizes == [128, 128, 64, 64, 32]
    assert triton_ops.varlen_tile(256, 48, torch.bfloat16, True, 15).block_m == 64, "a tile holds a whole group"
    others = [(71, torch.bfloat16, True), (8, torch.float32, True), (8, torch.bfloat16, False)]
    for key in [(512, 8, torch.bfloat16, True), *((256, *other) for other in others)]:
        assert triton_ops.varlen_tile(*key, 15) == triton_ops.varlen_tile(*key)
