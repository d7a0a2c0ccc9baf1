"""Static buffers are rewritten whole: nothing of an earlier step, and no garbage, survives in a bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from breakgraph.errors import ConfigError
from breakgraph.runners.buffers import StaticBuffers, _Layout, live_fields, stage_fields
from breakgraph.runners.spec import FieldSpec, Pad, PhaseSpec
from unit.runners.fakes import decode_batch, make_batch, make_decode_spec, make_prefill_spec

CPU = torch.device("cpu")
GARBAGE = -123456


def poisoned(spec: PhaseSpec) -> StaticBuffers:
    buffers = StaticBuffers(spec, CPU)
    for buffer in buffers.views(spec.ladder[-1]).values():
        buffer.fill_(GARBAGE)
    return buffers


def test_prefill_padding_by_hand() -> None:
    views = poisoned(make_prefill_spec()).load(make_batch([(3, 1), (0, 5)], first_token=10), 8)
    assert {name: view.tolist() for name, view in views.items()} == {
        "input_ids": [10, 11, 12, 13, 14, 15, 0, 0],
        "positions": [3, 0, 1, 2, 3, 4, 0, 0],
        "slot_mapping": [7, 8, 9, 10, 11, 12, 0, 0],
        "logits_rows": [0, 5, 5, 5],
        "num_live_tokens": [6],
    }


def test_unused_request_slots_are_sentinels_by_hand() -> None:
    spec = make_prefill_spec(request_slots=3)
    buffers = poisoned(spec)
    buffers.load(make_batch([(9, 2), (8, 3), (1, 1)]), 8)
    views = buffers.load(make_batch([(3, 1), (0, 5)], first_token=10), 8)
    assert {name: view.tolist() for name, view in views.items()} == {
        "input_ids": [10, 11, 12, 13, 14, 15, 0, 0],
        "positions": [3, 0, 1, 2, 3, 4, 0, 0],
        "slot_mapping": [7, 8, 9, 10, 11, 12, 0, 0],
        "logits_rows": [0, 5, 5],
        "num_live_tokens": [6],
        "cu_seqlens_q": [0, 1, 6, 6],
        "seq_lens": [4, 5, 0],
        "block_tables": [[1] + [0] * 7, [2, 3] + [0] * 6, [0] * 8],
    }


@pytest.mark.parametrize("size", [4, 8])
def test_tokens_on_the_device_are_put_where_those_of_the_host_are(size: int) -> None:
    spec = make_prefill_spec()
    host = make_batch([(3, 1), (0, 3)], first_token=10)
    batch = dataclasses.replace(host, input_ids=torch.tensor(host.input_ids))
    spec.check(batch)
    views, expected = poisoned(spec).load(batch, size), poisoned(spec).load(host, size)
    assert {name: view.tolist() for name, view in views.items()} == {n: v.tolist() for n, v in expected.items()}
    fresh, plain = live_fields(spec, batch, CPU), live_fields(spec, host, CPU)
    assert {name: view.tolist() for name, view in fresh.items()} == {n: v.tolist() for n, v in plain.items()}


def test_too_few_tokens_on_the_device_are_refused() -> None:
    batch = dataclasses.replace(make_batch([(3, 1), (0, 3)]), input_ids=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="expected 3 entries as in input_ids, got 4"):
        make_prefill_spec().check(batch)


@pytest.mark.parametrize("request_slots", [None, 3])
def test_what_breaks_read_is_there_in_live_rows_only(request_slots: int | None) -> None:
    spec = make_prefill_spec(request_slots=request_slots)
    buffers, plain = poisoned(spec), poisoned(spec)
    for requests in ([(3, 1), (0, 5)], [(9, 2)], [(1, 1), (0, 2), (2, 2)]):  # one after the other in the same memory
        batch = make_batch(requests, first_token=10)
        views, expected = buffers.load(batch, 8, for_breaks=True), plain.load(batch, 8)
        assert {name: view.tolist() for name, view in buffers.break_views.items()} == {
            "cu_seqlens_q": list(batch.cu_seqlens_q),
            "seq_lens": list(batch.seq_lens),
            "block_tables": [list(t) + [0] * (max(map(len, batch.block_tables)) - len(t)) for t in batch.block_tables],
        }
        for name in ("input_ids", "positions", "slot_mapping", "logits_rows", "num_live_tokens"):
            assert views[name].tolist() == expected[name].tolist(), name
        assert plain.break_views == {}


def test_the_most_that_breaks_may_read_has_room() -> None:
    spec = make_prefill_spec()
    buffers = StaticBuffers(spec, CPU)
    buffers.load(spec.longest_batch(spec.ladder[-1], spec.max_num_seqs), spec.ladder[-1], for_breaks=True)
    assert buffers.break_views["block_tables"].shape == (spec.max_num_seqs, spec.max_blocks_per_seq)


def test_what_breaks_read_has_new_names_or_those_of_the_last_fields() -> None:
    spec = make_prefill_spec()
    positions = tuple(field for field in spec.fields if field.name == "positions")
    with pytest.raises(AssertionError, match=r"\['positions'\] are not the last fields"):
        StaticBuffers(dataclasses.replace(spec, break_fields=positions), CPU)


def test_decode_padding_by_hand() -> None:
    views = poisoned(make_decode_spec()).load(make_batch([(3, 1), (4, 1), (0, 1)], first_token=10), 4)
    assert {name: view.tolist() for name, view in views.items()} == {
        "input_ids": [10, 11, 12, 0],
        "positions": [3, 4, 0, 0],
        "slot_mapping": [7, 12, 16, 0],
        "seq_lens": [4, 5, 1, 1],
        "block_tables": [[1] + [0] * 7, [2, 3] + [0] * 6, [4] + [0] * 7, [0] * 8],
        "logits_rows": [0, 1, 2, 2],
        "num_live_tokens": [3],
    }


def test_dtypes_are_the_ones_that_kernels_take() -> None:
    views = StaticBuffers(make_decode_spec(), CPU).views(4)
    int32 = {name for name, view in views.items() if view.dtype == torch.int32}
    assert int32 == {"seq_lens", "block_tables", "num_live_tokens"}
    assert {view.dtype for name, view in views.items() if name not in int32} == {torch.int64}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tails_of_a_bigger_batch_are_gone(size: int) -> None:
    spec = make_decode_spec()
    buffers, clean = poisoned(spec), StaticBuffers(spec, CPU)
    buffers.load(decode_batch(8, first_token=50), 8)
    views = buffers.load(decode_batch(1), size)
    for name, expected in clean.load(decode_batch(1), size).items():
        assert torch.equal(views[name], expected), name
    assert views["slot_mapping"][1:].tolist() == [0] * (size - 1)


@pytest.mark.parametrize("make_spec", [make_prefill_spec, make_decode_spec])
def test_fields_of_a_bucket_lie_apart_and_start_as_allocations_do(make_spec: Callable[[], PhaseSpec]) -> None:
    spec = make_spec()
    buffers = StaticBuffers(spec, CPU)
    for size in spec.ladder:
        views = sorted(buffers.views(size).values(), key=torch.Tensor.data_ptr)
        base = views[0].untyped_storage().data_ptr()
        assert all((view.data_ptr() - base) % 256 == 0 for view in views)
        ends = [view.data_ptr() + view.nbytes for view in views]
        assert all(end <= later.data_ptr() for end, later in zip(ends, views[1:], strict=False))
        assert ends[-1] <= base + buffers.num_bytes


def test_loads_keep_the_addresses_of_a_bucket() -> None:
    buffers = StaticBuffers(make_prefill_spec(), CPU)
    before = {name: view.data_ptr() for name, view in buffers.views(4).items()}
    buffers.load(make_batch([(0, 9)]), 16)
    loaded = buffers.load(make_batch([(0, 3)]), 4)
    assert {name: view.data_ptr() for name, view in loaded.items()} == before


@pytest.mark.parametrize(("requests", "size"), [([(0, 9)], 8), ([(40, 1)], 8), ([(0, 1)] * 9, 16)])
def test_a_step_that_nobody_checked_does_not_run_over(requests: list[tuple[int, int]], size: int) -> None:
    """Into the next field: more tokens than the bucket has, a table that is too long, more requests than rows."""
    buffers = poisoned(make_prefill_spec(request_slots=3))
    with pytest.raises(AssertionError, match="rows"):
        buffers.load(make_batch(requests), size)
    assert all(view.eq(GARBAGE).all() for view in buffers.views(16).values())


def test_every_step_stages_in_memory_of_its_own() -> None:
    field = FieldSpec(name="seq_lens", dtype=torch.int32, axis="requests", pad=Pad.REPEAT_LAST)
    first, second = (stage_fields([(field, values)], CPU)["seq_lens"] for values in ([1, 2], [3, 4]))
    assert first.tolist() == [1, 2]
    assert second.tolist() == [3, 4]


def test_live_fields_have_no_padding() -> None:
    fields = live_fields(make_decode_spec(), decode_batch(3), CPU)
    assert {name: tuple(value.shape) for name, value in fields.items()} == {
        "input_ids": (3,),
        "positions": (3,),
        "slot_mapping": (3,),
        "seq_lens": (3,),
        "block_tables": (3, 8),
        "logits_rows": (3,),
        "num_live_tokens": (1,),
    }


def test_staging_is_pinned_where_copies_are_asynchronous(device: torch.device) -> None:
    field = FieldSpec(name="seq_lens", dtype=torch.int32, axis="requests", pad=1)
    staged = _Layout([(field, 2)]).stage([[5]], device)
    assert staged.is_pinned() == (device.type == "cuda")
    assert staged.view(torch.int32).tolist() == [5, 1]


def test_steps_in_flight_keep_their_values(device: torch.device) -> None:
    buffers = StaticBuffers(make_decode_spec(), device)
    if device.type == "cuda":
        torch.cuda._sleep(200_000_000)
    seen = []
    for step in range(20):
        seen.append(buffers.load(decode_batch(3, first_token=10 * step), 4)["input_ids"].clone())
    assert [ids.tolist() for ids in seen] == [[10 * s, 10 * s + 1, 10 * s + 2, 0] for s in range(20)]
