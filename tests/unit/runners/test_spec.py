"""Batches against themselves and against their phase: every error names the field, what was expected and what came."""

from __future__ import annotations

import array
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from breakgraph.errors import ConfigError
from breakgraph.graph import ShapeKey
from breakgraph.runners import FieldSpec, StepBatch
from unit.runners.fakes import BLOCK_SIZE, NUM_BLOCKS, decode_batch, make_batch, make_decode_spec, make_prefill_spec

GOOD = make_batch([(3, 1), (0, 5), (6, 2)])


def test_good_batches_pass() -> None:
    make_prefill_spec().check(GOOD)
    make_decode_spec().check(decode_batch(8))


def test_counts() -> None:
    assert (GOOD.num_tokens, GOOD.num_reqs) == (8, 3)
    assert list(GOOD.logits_rows) == [0, 5, 7]


def as_arrays(batch: StepBatch) -> StepBatch:
    changes: dict[str, Any] = {
        field.name: np.array(getattr(batch, field.name))
        for field in dataclasses.fields(batch)
        if field.name != "block_tables"
    }
    return dataclasses.replace(batch, block_tables=[array.array("i", t) for t in batch.block_tables], **changes)


def test_arrays_are_batches_too() -> None:
    make_prefill_spec().check(as_arrays(GOOD))
    wrong = dataclasses.replace(as_arrays(GOOD), slot_mapping=np.array([*list(GOOD.slot_mapping)[:-1], 5]))
    with pytest.raises(ConfigError, match="slot_mapping says 5"):
        make_prefill_spec().check(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": [0]}, "positions: expected 8 entries as in input_ids, got 1"),
        ({"slot_mapping": []}, "slot_mapping: expected 8 entries as in input_ids, got 0"),
        ({"seq_lens": [4]}, "seq_lens: expected 3 entries as in q_lens, got 1"),
        ({"block_tables": [[1]]}, "block_tables: expected 3 entries as in q_lens, got 1"),
        ({"logits_rows": [0, 1, 2, 3]}, "logits_rows: expected 3 entries as in q_lens, got 4"),
        ({"q_lens": [1, 5, 3]}, "q_lens: expected a sum of 8 .*got 9"),
        ({"q_lens": [0, 6, 2]}, "request 0: expected 1 <= q_len <= seq_len, got q_len 0"),
        ({"seq_lens": [4, 4, 8]}, "request 1: expected 1 <= q_len <= seq_len, got q_len 5, seq_len 4"),
        ({"logits_rows": [0, 5, 8]}, r"logits_rows\[2\]: expected 0 <= row < 8 \(tokens\), got 8"),
        ({"logits_rows": [-1, 5, 7]}, r"logits_rows\[0\]: expected 0 <= row < 8 \(tokens\), got -1"),
        ({"slot_mapping": [7, 3, *GOOD.slot_mapping[2:]]}, r"slot_mapping\[1\]: expected 4 <= slot < 256 .*got 3"),
        ({"slot_mapping": [256, *GOOD.slot_mapping[1:]]}, r"slot_mapping\[0\]: expected 4 <= slot < 256 .*got 256"),
        ({"slot_mapping": [-1, *GOOD.slot_mapping[1:]]}, r"slot_mapping\[0\]: expected 4 <= slot < 256 .*got -1"),
        ({"block_tables": [[1], [2], [4, 5]]}, r"block_tables\[1\]: expected 2 \(seq_len 5\) to 8 .*got 1"),
        ({"block_tables": [[1] * 9, [2, 3], [4, 5]]}, r"block_tables\[0\]: expected 1 \(seq_len 4\) to 8 .*got 9"),
        ({"block_tables": [[1], [2, 3], [4, 64]]}, r"block_tables\[2\]: expected 0 <= value < 64, got .*64"),
        ({"block_tables": [[-1], [2, 3], [4, 5]]}, r"block_tables\[0\]: expected 0 <= value < 64, got .*-1"),
        ({"block_tables": [[1], [4, 5], [2, 3]]}, "request 1: its block table puts its last token in slot 20"),
        ({"seq_lens": [4, 5, 9], "block_tables": [[1], [2, 3], [4, 5, 6]]}, "request 2: .*slot 24, .*says 23"),
    ],
)
def test_a_batch_that_disagrees_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_prefill_spec().check(dataclasses.replace(GOOD, **changes))


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one request, got none"):
        make_prefill_spec().check(make_batch([]))


def test_a_longer_block_table_is_allowed() -> None:
    tables = [[*table, 60, 61] for table in GOOD.block_tables]
    make_prefill_spec().check(dataclasses.replace(GOOD, block_tables=tables))


def test_decode_takes_one_token_a_request() -> None:
    with pytest.raises(ConfigError, match="decode: expected 1 new tokens in request 1, got 5"):
        make_decode_spec().check(GOOD)


def test_rows() -> None:
    prefill, decode = make_prefill_spec(), make_decode_spec()
    assert [prefill.num_rows("tokens", size) for size in prefill.ladder] == [4, 8, 16]
    assert [prefill.num_rows("requests", size) for size in (2, *prefill.ladder)] == [2, 4, 4, 4]
    assert [decode.num_rows("tokens", size) for size in decode.ladder] == [2, 4, 8]
    assert [decode.num_rows("requests", size) for size in decode.ladder] == [2, 4, 8]
    speculative = dataclasses.replace(decode, tokens_per_req=3)
    assert (speculative.num_rows("tokens", 4), speculative.num_rows("requests", 4)) == (12, 4)


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "bucket"),
    [(1, 1, 4), (4, 4, 4), (5, 4, 8), (8, 1, 8), (9, 2, 16), (16, 4, 16), (17, 1, None), (8, 5, None)],
)
def test_prefill_bucket_holds_tokens_and_requests(num_tokens: int, num_reqs: int, bucket: int | None) -> None:
    assert make_prefill_spec().bucket_for(num_tokens, num_reqs) == bucket


def test_decode_bucket_counts_requests() -> None:
    assert [make_decode_spec().bucket_for(n, n) for n in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]


@pytest.mark.parametrize("size", [1, 4, 16, 40, 200])
@pytest.mark.parametrize("spec", [make_prefill_spec(), make_decode_spec()], ids=lambda spec: spec.phase)
def test_dummy_batches_fill_the_bucket_and_touch_no_request(spec: Any, size: int) -> None:
    batch = spec.dummy_batch(size)
    batch.check()
    # 4 requests of 32 tokens are the most that a prefill can have.
    assert batch.num_tokens == min(spec.num_rows("tokens", size), 128 if spec.phase == "prefill" else 1000)
    assert batch.num_reqs <= spec.num_rows("requests", size)
    assert set(batch.slot_mapping) == {0}
    assert {block for table in batch.block_tables for block in table} == {0}
    assert max(batch.seq_lens) <= spec.max_model_len
    assert all(BLOCK_SIZE * len(t) >= n for t, n in zip(batch.block_tables, batch.seq_lens, strict=True))


@pytest.mark.parametrize(
    ("spec", "size", "num_reqs", "q_lens"),
    [
        (make_prefill_spec(), 16, 3, [6, 5, 5]),
        (make_prefill_spec(), 16, 9, [4, 4, 4, 4]),  # max_num_seqs
        (make_prefill_spec(), 2, 4, [1, 1]),
        (make_prefill_spec(max_num_batched_tokens=100, buckets=(100,)), 100, 2, [32, 32]),  # max_model_len
        (make_decode_spec(), 8, 3, [1, 1, 1]),
        (make_decode_spec(), 2, 8, [1, 1]),
    ],
)
def test_longest_batches_have_requests_of_the_greatest_length_and_touch_none(
    spec: Any, size: int, num_reqs: int, q_lens: list[int]
) -> None:
    batch = spec.longest_batch(size, num_reqs)
    batch.check()
    assert batch.q_lens == q_lens
    assert batch.seq_lens == [spec.max_model_len] * len(q_lens)
    assert set(batch.slot_mapping) == {0}
    assert {block for table in batch.block_tables for block in table} == {0}
    assert {len(table) for table in batch.block_tables} == {spec.max_blocks_per_seq}
    assert batch.positions[-1] == spec.max_model_len - 1
    assert batch.positions[0] == spec.max_model_len - q_lens[0]


@pytest.mark.parametrize(
    ("spec", "holds"),
    [
        (make_prefill_spec(), True),
        (make_prefill_spec(buckets=(8, 32)), True),
        (make_prefill_spec(buckets=(4, 15)), False),
        (make_decode_spec(), True),
        (make_decode_spec(buckets=(7,)), False),
    ],
)
def test_whether_a_ladder_holds_every_step(spec: Any, holds: bool) -> None:
    assert spec.holds_every_step == holds


def test_key_and_default_ladders_reach_the_scheduler_maximum() -> None:
    assert make_prefill_spec().key(8) == ShapeKey("prefill", 8)
    assert make_prefill_spec(buckets=None, max_num_batched_tokens=100).ladder[-1] == 100
    assert make_decode_spec(buckets=None, max_num_seqs=7).ladder == (1, 2, 4, 7)
    with pytest.raises(ConfigError, match="prefill_buckets"):
        make_prefill_spec(buckets=[0])
    with pytest.raises(ConfigError, match="decode_buckets"):
        make_decode_spec(buckets=[0])


def test_cache_facts() -> None:
    spec = make_decode_spec(max_model_len=33)
    assert (spec.max_blocks_per_seq, spec.max_model_len, spec.num_blocks) == (9, 36, NUM_BLOCKS)


def test_a_field_without_a_source_is_a_bug() -> None:
    stray = FieldSpec(name="adapter_ids", dtype=torch.int32, axis="tokens", pad=0)
    with pytest.raises(AssertionError, match="'adapter_ids' is not one of"):
        dataclasses.replace(make_prefill_spec(), fields=(stray,))


def test_request_buckets_need_a_fixed_request_size() -> None:
    with pytest.raises(AssertionError, match="requests of unknown size"):
        dataclasses.replace(make_decode_spec(), tokens_per_req=None)


@pytest.mark.parametrize("dtype", [np.uint32, np.int16, np.int64])
def test_lengths_may_be_integers_of_any_kind(dtype: type) -> None:
    batch = make_batch([(4, 2), (0, 5)])
    lens = {name: np.asarray(getattr(batch, name), dtype) for name in ("q_lens", "seq_lens")}
    make_prefill_spec().check(dataclasses.replace(batch, **lens))
