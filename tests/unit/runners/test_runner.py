"""The runner on a plan family, an attention and a forward that only record."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from breakgraph.attention import current_step
from breakgraph.errors import ClosedError, ConfigError
from breakgraph.graph import ShapeKey
from breakgraph.runners import DecodeRunner, PrefillRunner, Runner, SlottedPrefillRunner, prefill
from breakgraph.runners.buffers import live_fields, stage_fields
from unit.backends.fakes import FakeFamily
from unit.runners.fakes import (
    SETUPS,
    Setup,
    decode_batch,
    decode_setup,
    expected_logits,
    make_batch,
    make_decode_spec,
    make_prefill_spec,
    prefill_setup,
)

BOTH = pytest.mark.parametrize("phase", ["prefill", "decode"])


def counts(setup: Setup) -> dict[str, object]:
    stats = setup.runner.stats.to_dict()
    return {name: stats[name] for name in ("num_replays_by_bucket", "num_eager_steps_by_reason", "num_padded_tokens")}


@BOTH
@pytest.mark.parametrize(
    ("size", "bucket"), [(1, 4), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8)], ids=lambda value: str(value)
)
def test_a_step_is_padded_to_the_smallest_bucket_and_sliced_back(phase: str, size: int, bucket: int) -> None:
    make, batch_of = SETUPS[phase]
    setup, batch = make(buckets=(4, 8)).ready(), batch_of(size)
    setup.poison()
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    assert setup.family.events == [f"replay {phase}[{bucket}]"]
    assert setup.forward.calls[0]["input_ids"].shape == (bucket,)
    assert counts(setup) == {
        "num_replays_by_bucket": {str(bucket): 1},
        "num_eager_steps_by_reason": {},
        "num_padded_tokens": bucket - size,
    }


@BOTH
def test_one_more_than_the_ladder_runs_eagerly_unpadded_and_is_counted(phase: str) -> None:
    make, batch_of = SETUPS[phase]
    setup = make(buckets=(4, 8)).ready()
    batch = batch_of(9)
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    assert setup.family.events == []
    assert setup.forward.calls[0]["input_ids"].shape == (9,)
    reason = {"prefill": "too_many_tokens", "decode": "too_many_requests"}[phase]
    assert counts(setup) == {
        "num_replays_by_bucket": {},
        "num_eager_steps_by_reason": {reason: 1},
        "num_padded_tokens": 0,
    }


def test_more_requests_than_logits_rows_run_eagerly_and_are_counted() -> None:
    setup = prefill_setup().ready()
    batch = make_batch([(2, 1)] * 5)
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    assert setup.forward.calls[0]["logits_rows"].tolist() == [0, 1, 2, 3, 4]
    assert counts(setup)["num_eager_steps_by_reason"] == {"too_many_requests": 1}


@BOTH
def test_before_capture_steps_run_eagerly_and_are_counted(phase: str) -> None:
    make, batch_of = SETUPS[phase]
    setup = make()
    batch = batch_of(2)
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    setup.runner.allocate()
    setup.runner.run(batch)
    assert counts(setup)["num_eager_steps_by_reason"] == {"not_captured": 2}
    setup.runner.capture()
    setup.runner.run(batch)
    assert counts(setup)["num_eager_steps_by_reason"] == {"not_captured": 2}


@BOTH
def test_backend_eager_runs_everything_eagerly(phase: str) -> None:
    make, batch_of = SETUPS[phase]
    setup = make("eager").ready()
    for size in (1, 4, 30):
        setup.runner.run(batch_of(size) if phase == "decode" else make_batch([(2, size)]))
    assert counts(setup)["num_eager_steps_by_reason"] == {"backend_eager": 3}
    assert setup.family.events == []
    assert [len(call["input_ids"]) for call in setup.forward.calls] == [1, 4, 30]


def test_mixed_rows_are_requests_with_one_new_token() -> None:
    setup = prefill_setup().ready()
    batch = make_batch([(7, 1), (9, 1), (0, 5), (4, 4)])
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    (step,) = setup.attention.steps
    assert (step.num_tokens, step.padded_num_tokens) == (11, 16)
    assert (step.q_lens, step.seq_lens) == ((1, 1, 5, 4), (8, 10, 5, 8))
    assert step.cu_seqlens_q_gpu.tolist() == [0, 1, 2, 7, 11]
    assert step.seq_lens_gpu.tolist() == [8, 10, 5, 8]
    assert step.block_tables_gpu.tolist() == [[1, 2, 0], [3, 4, 5], [6, 7, 0], [8, 9, 0]]
    assert step.slot_mapping_gpu.tolist() == [*batch.slot_mapping, 0, 0, 0, 0, 0]
    assert {step.cu_seqlens_q_gpu.dtype, step.seq_lens_gpu.dtype, step.block_tables_gpu.dtype} == {torch.int32}


def test_prefill_metadata_is_new_on_every_step() -> None:
    setup = prefill_setup().ready()
    for requests, lens, tables in (
        ([(0, 3)], [3], [[1]]), ([(4, 2), (0, 1)], [6, 1], [[1, 2], [3, 0]]), ([(0, 2)], [2], [[1]])
    ):  # fmt: skip
        setup.runner.run(make_batch(requests))
        step = setup.attention.steps[-1]
        assert step.seq_lens_gpu.tolist() == lens
        assert step.block_tables_gpu.tolist() == tables


def test_prefill_refuses_a_block_out_of_range() -> None:
    setup = prefill_setup().ready()
    batch = make_batch([(4, 2)])
    with pytest.raises(ConfigError, match=r"block_tables\[0\]: expected 0 <= value < 64, got \[64, 2\]"):
        setup.runner.run(dataclasses.replace(batch, block_tables=[[64, 2]]))


def test_request_tensors_of_a_prompt_go_to_the_device_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = prefill_setup().ready().runner
    monkeypatch.setattr(prefill, "stage_fields", None)
    batch = make_batch([(4, 2), (0, 3)])
    step = runner._attention_step(batch, runner._load(batch, 8), in_bucket=True)
    assert step.block_tables is batch.block_tables
    assert step.seq_lens_gpu.tolist() == [6, 3]
    assert step.cu_seqlens_q_gpu.tolist() == [0, 2, 5]
    assert step.block_tables_gpu.shape[0] == 2


def test_those_of_an_eager_prompt_go_there_once_and_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = prefill_setup().ready().runner
    staged: list[object] = []
    monkeypatch.setattr(prefill, "stage_fields", lambda *args: staged.append(args) or stage_fields(*args))
    batch = make_batch([(4, 2), (0, 3)])
    step = runner._attention_step(batch, live_fields(runner.spec, batch, runner.device), in_bucket=False)
    assert step.block_tables is batch.block_tables
    assert staged == []
    assert step.seq_lens_gpu.tolist() == [6, 3]
    assert step.cu_seqlens_q_gpu.tolist() == [0, 2, 5]
    assert step.block_tables_gpu.shape[0] == 2
    assert len(staged) == 1


def test_decode_metadata_is_the_static_buffers_with_the_live_lengths_beside() -> None:
    setup = decode_setup().ready()
    setup.runner.run(decode_batch(3))
    setup.runner.run(decode_batch(4))
    first, second = setup.attention.steps
    assert (first.num_tokens, first.padded_num_tokens, first.q_lens, first.seq_lens) == (
        3,
        4,
        (1, 1, 1),
        (4, 5, 6),
    )
    assert first.cu_seqlens_q_gpu is None
    for name in ("seq_lens_gpu", "block_tables_gpu", "slot_mapping_gpu"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    assert second.seq_lens_gpu.tolist() == [4, 5, 6, 7]


@BOTH
def test_padded_slots_go_to_the_reserved_slot_after_a_bigger_batch(phase: str) -> None:
    make, batch_of = SETUPS[phase]
    setup = make(buckets=(8,)).ready()
    setup.runner.run(batch_of(8))
    setup.poison()
    setup.runner.run(batch_of(2))
    call = setup.forward.calls[-1]
    assert call["slot_mapping"][2:].tolist() == [0] * 6
    assert call["input_ids"][2:].tolist() == [0] * 6
    assert call["positions"][2:].tolist() == [0] * 6
    assert call["slot_mapping"][:2].tolist() == list(batch_of(2).slot_mapping)


@BOTH
def test_run_padded_eager_is_the_replay_without_the_plan(phase: str) -> None:
    make, batch_of = SETUPS[phase]
    setup, batch = make().ready(), batch_of(3)
    replayed = setup.runner.run(batch)
    setup.poison()
    padded = setup.runner.run_padded_eager(batch)
    assert torch.equal(padded, replayed)
    by_replay, by_eager = setup.forward.calls
    assert all(torch.equal(by_replay[name], by_eager[name]) for name in by_replay)
    assert setup.family.events == [f"replay {phase}[4]"]
    setup.runner.run_padded_eager(batch_of(2))
    assert padded.tolist() == expected_logits(batch)
    assert counts(setup)["num_replays_by_bucket"] == {"4": 1}


def test_run_padded_eager_needs_a_bucket() -> None:
    with pytest.raises(ConfigError, match="decode: expected a step that fits bucket 8, got 9 tokens in 9 requests"):
        decode_setup().ready().runner.run_padded_eager(decode_batch(9))


@pytest.mark.parametrize(("backend", "planned"), [("breakable", 0), ("full", 1)])
def test_attention_is_planned_behind_the_first_segment_where_there_are_breaks(
    backend: str, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = decode_setup(backend).ready()
    replay, seen = setup.runner.backend.replay, []

    def spy(key: ShapeKey) -> object:
        seen.append(len(setup.attention.steps))
        return replay(key)

    monkeypatch.setattr(setup.runner.backend, "replay", spy)
    batch = decode_batch(2)
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    assert seen == [planned]
    assert len(setup.attention.steps) == 1


@BOTH
@pytest.mark.parametrize("method", ["run", "run_padded_eager"])
def test_a_wrong_batch_is_refused_before_anything_is_touched(phase: str, method: str) -> None:
    make, batch_of = SETUPS[phase]
    setup = make().ready()
    setup.poison()
    batch = dataclasses.replace(batch_of(2), slot_mapping=[0, 1])
    with pytest.raises(ConfigError, match=f"{phase}: slot_mapping"):
        getattr(setup.runner, method)(batch)
    assert setup.forward.calls == []
    assert setup.attention.steps == []
    assert all(buffer.eq(77).all() for buffer in setup.runner._buffers.views(setup.runner.spec.ladder[-1]).values())
    assert counts(setup) == {"num_replays_by_bucket": {}, "num_eager_steps_by_reason": {}, "num_padded_tokens": 0}


@BOTH
def test_capture_goes_from_the_largest_down_inside_one_window(phase: str) -> None:
    setup = SETUPS[phase][0](buckets=(2, 4, 8))
    setup.runner.allocate()
    seen: list[tuple[str, int, int]] = []
    setup.runner.capture(lambda *progress: seen.append(progress))
    names = [f"{phase}[{size}]" for size in (8, 4, 2)]
    assert setup.family.events == ["window opens", *[f"capture {name}" for name in names], "window closes"]
    assert seen == [(name, done, 3) for done, name in enumerate(names, start=1)]
    assert list(map(str, setup.runner.explain())) == names
    assert setup.runner.stats.capture_sec > 0


@BOTH
def test_capture_writes_to_the_reserved_slot_only(phase: str) -> None:
    setup = SETUPS[phase][0]()
    setup.runner.allocate()
    setup.poison()
    setup.runner.capture()
    assert [len(call["input_ids"]) for call in setup.forward.calls] == list(reversed(setup.runner.spec.ladder))
    assert all(call["slot_mapping"].eq(0).all() for call in setup.forward.calls)
    assert all(table.eq(0).all() for table in setup.attention.tables)
    assert setup.forward.steps == setup.attention.steps


def test_capture_again_captures_what_is_missing() -> None:
    setup = prefill_setup().ready()
    setup.runner.capture()
    assert setup.family.events == ["window opens", "window closes"]
    setup.backend.release(setup.runner.spec.key(8))
    setup.forget()
    setup.runner.capture()
    assert setup.family.events == ["window opens", "capture prefill[8]", "window closes"]


@BOTH
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_capture_closes_what_it_captured(phase: str, error: BaseException) -> None:
    setup = SETUPS[phase][0](buckets=(2, 4, 8))
    setup.runner.allocate()
    setup.family.fail_at[f"{phase}[2]"] = error
    with pytest.raises(type(error)) as raised:
        setup.runner.capture()
    assert raised.value is error
    closed = [event for event in setup.family.events if event.startswith("close")]
    assert sorted(closed) == [f"close {phase}[4]", f"close {phase}[8]"]
    assert setup.runner.explain() == {}
    assert setup.runner.stats.capture_sec == 0
    with pytest.raises(RuntimeError, match="outside a step"):
        current_step()
    batch = SETUPS[phase][1](2)
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    assert counts(setup)["num_eager_steps_by_reason"] == {"not_captured": 1}
    setup.family.fail_at.clear()
    setup.runner.capture()
    assert len(setup.runner.explain()) == 3


def test_a_failed_capture_leaves_earlier_plans_alone() -> None:
    setup = prefill_setup().ready()
    for size in (4, 8):
        setup.backend.release(setup.runner.spec.key(size))
    setup.family.fail_at["prefill[4]"] = error = ValueError("boom")
    setup.forget()
    with pytest.raises(ValueError, match="boom") as raised:
        setup.runner.capture()
    assert raised.value is error
    assert list(map(str, setup.runner.explain())) == ["prefill[16]"]


def test_an_interrupt_from_the_progress_callback_undoes_the_capture_too() -> None:
    setup = prefill_setup()
    setup.runner.allocate()

    def interrupt(label: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        setup.runner.capture(interrupt)
    assert setup.runner.explain() == {}


def test_a_failing_close_does_not_hide_the_capture_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = prefill_setup()
    setup.runner.allocate()
    setup.family.fail_at["prefill[4]"] = RuntimeError("first")

    def fail(key: object) -> None:
        raise RuntimeError("second")

    monkeypatch.setattr(setup.backend, "release", fail)
    with pytest.raises(RuntimeError, match="first"):
        setup.runner.capture()
    assert "could not close prefill[16]" in caplog.text


@pytest.mark.parametrize("support", ["none", "decode"])
def test_full_prefill_needs_varlen_attention(support: str) -> None:
    setup = Setup(SlottedPrefillRunner, make_prefill_spec(request_slots=4), "full", support)
    with pytest.raises(ConfigError, match=rf"prefill with backend 'full' .* varlen, attention 'fake' has '{support}'"):
        setup.runner.allocate()


def test_full_prefill_needs_metadata_at_a_fixed_place() -> None:
    setup = Setup(PrefillRunner, make_prefill_spec(), "full", "varlen")
    with pytest.raises(ConfigError, match=r"prefill with backend 'full' puts attention .* give the spec request_slots"):
        setup.runner.allocate()


def test_full_decode_needs_attention_that_a_graph_can_hold() -> None:
    setup = Setup(DecodeRunner, make_decode_spec(), "full", "none")
    with pytest.raises(ConfigError, match=r"decode with backend 'full' .* decode or varlen, .*'fake' has 'none'"):
        setup.runner.allocate()


@pytest.mark.parametrize(
    ("runner_class", "backend", "support"),
    [
        (SlottedPrefillRunner, "full", "varlen"),
        (SlottedPrefillRunner, "breakable", "none"),
        (PrefillRunner, "breakable", "none"),
        (PrefillRunner, "debug_eager", "none"),
        (PrefillRunner, "eager", "none"),
        (DecodeRunner, "full", "varlen"),
        (DecodeRunner, "breakable", "none"),
    ],
)
def test_other_pairs_are_allowed(runner_class: type[Runner], backend: str, support: str) -> None:
    slotted = make_prefill_spec(request_slots=2)
    specs = {PrefillRunner: make_prefill_spec(), SlottedPrefillRunner: slotted, DecodeRunner: make_decode_spec()}
    spec = specs[runner_class]
    Setup(runner_class, spec, backend, support).ready()


@BOTH
def test_warm_up_runs_the_largest_step_of_the_scheduler(phase: str) -> None:
    make = SETUPS[phase][0]
    setup = make(buckets=(2,))
    setup.runner.warm_up()
    assert [len(call["input_ids"]) for call in setup.forward.calls] == [setup.runner.spec.max_size]
    assert setup.forward.calls[0]["slot_mapping"].eq(0).all()
    assert setup.runner.stats.to_dict()["num_eager_steps_by_reason"] == {}


def test_constructing_does_nothing() -> None:
    setup = prefill_setup()
    assert (setup.family.events, setup.forward.calls, setup.attention.steps) == ([], [], [])


@pytest.mark.parametrize("use", ["capture", "run_padded_eager"])
def test_buffers_are_allocated_first(use: str) -> None:
    runner = prefill_setup().runner
    arguments = [make_batch([(0, 1)])] if use == "run_padded_eager" else []
    with pytest.raises(ConfigError, match=r"no buffers yet; call allocate\(\) first"):
        getattr(runner, use)(*arguments)


@BOTH
def test_close_closes_the_plans_and_ends_the_runner(phase: str) -> None:
    setup = SETUPS[phase][0](buckets=(2, 4)).ready()
    setup.runner.close()
    setup.runner.close()
    assert setup.family.events == [f"close {phase}[4]", f"close {phase}[2]"]
    for use in (setup.runner.allocate, setup.runner.warm_up, setup.runner.capture):
        with pytest.raises(ClosedError, match=f"the {phase} runner was closed"):
            use()
    for run in (setup.runner.run, setup.runner.run_padded_eager):
        with pytest.raises(ClosedError):
            run(SETUPS[phase][1](1))


def test_a_step_that_raises_is_not_counted_and_leaves_the_runner_usable() -> None:
    setup = prefill_setup().ready()

    def fail(key: object) -> None:
        raise RuntimeError("break failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.backend, "replay", fail)
        with pytest.raises(RuntimeError, match="break failed"):
            setup.runner.run(make_batch([(0, 3)]))
    batch = make_batch([(0, 2)])
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
    assert counts(setup)["num_replays_by_bucket"] == {"4": 1}


def test_grad_is_off_in_every_path() -> None:
    setup = prefill_setup()
    seen: list[bool] = []
    setup.runner.forward = lambda fields: seen.append(torch.is_grad_enabled()) or setup.forward(fields)
    setup.runner.allocate()
    setup.runner.warm_up()
    setup.runner.capture()
    for size in (3, 17):
        setup.runner.run(make_batch([(0, size)]))
    setup.runner.run_padded_eager(make_batch([(0, 3)]))
    assert seen == [False] * 7


def test_two_runners_on_one_family_keep_their_buffers_apart() -> None:
    family = FakeFamily()
    prefill = Setup(PrefillRunner, make_prefill_spec(), "breakable", family=family).ready()
    decode = Setup(DecodeRunner, make_decode_spec(), "full", family=family).ready()
    prompt, step = make_batch([(0, 5)], first_token=100), decode_batch(3)
    for _ in range(2):
        assert prefill.runner.run(prompt).tolist() == expected_logits(prompt)
        assert decode.runner.run(step).tolist() == expected_logits(step)
    assert family.events == ["replay prefill[8]", "replay decode[4]"] * 2
    prefill.runner.close()
    assert decode.runner.run(step).tolist() == expected_logits(step)


def test_phases_differ_by_data_and_one_method() -> None:
    for subclass in (PrefillRunner, SlottedPrefillRunner, DecodeRunner):
        own = [name for name, value in vars(subclass).items() if inspect.isfunction(value)]
        assert own == ["_attention_step"]


def test_run_padded_eager_keeps_its_result_even_if_the_forward_returns_a_static_buffer() -> None:
    setup = decode_setup()
    setup.runner.forward = lambda fields: fields["input_ids"][:, None]
    setup.runner.allocate()
    first = setup.runner.run_padded_eager(decode_batch(2, first_token=10))
    setup.runner.run_padded_eager(decode_batch(2, first_token=20))
    assert first.tolist() == [[10], [11]]


def test_allocating_again_keeps_the_buffers_that_plans_read() -> None:
    setup = decode_setup().ready()
    setup.runner.allocate()
    batch = decode_batch(3)
    assert setup.runner.run(batch).tolist() == expected_logits(batch)
