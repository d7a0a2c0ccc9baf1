import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.engine.request import RequestStatus
from breakgraph.engine.scheduler import ScheduledStep, Scheduler
from breakgraph.errors import RequestTooLargeError
from unit.engine.symbolic_kv import BLOCK_SIZE, make_request, make_scheduler


def shape(step: ScheduledStep | None) -> list[tuple[str, int]]:
    assert step is not None
    return [(row.request.request_id, row.num_new_tokens) for row in step.rows]


def run_step(scheduler: Scheduler, token_id: int = 7) -> list[tuple[str, int]]:
    step = scheduler.schedule()
    assert step is not None
    rows = shape(step)
    scheduler.commit(step, [token_id if row.needs_sample else None for row in step.rows])
    return rows


def test_nothing_to_do() -> None:
    assert make_scheduler().schedule() is None


def test_a_short_prompt_is_one_step_and_then_decodes() -> None:
    scheduler = make_scheduler()
    request = make_request("a", prompt=5, max_tokens=3)
    scheduler.add(request)
    assert [run_step(scheduler) for _ in range(3)] == [[("a", 5)], [("a", 1)], [("a", 1)]]
    assert (request.status, request.finish_reason, len(request.output_token_ids)) == (
        RequestStatus.FINISHED,
        "length",
        3,
    )
    assert not scheduler.has_requests
    assert scheduler.allocator.num_free == scheduler.allocator.num_usable


def test_a_long_prompt_comes_in_chunks_and_is_sampled_only_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", prompt=40))
    sampled = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        assert not step.is_decode
        sampled += [row.needs_sample for row in step.rows]
        scheduler.commit(step, [5 if row.needs_sample else None for row in step.rows])
    assert sampled == [False, False, True]
    assert scheduler.running[0].output_token_ids == [5]


def test_decode_rows_come_first_and_a_chunk_fills_the_rest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", prompt=3))
    run_step(scheduler)
    scheduler.add(make_request("b", prompt=40))
    step = scheduler.schedule()
    assert shape(step) == [("a", 1), ("b", 15)]
    assert step is not None
    assert not step.is_decode


def test_pure_decode_is_said_to_be() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt=3))
    scheduler.add(make_request("b", prompt=4))
    run_step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    assert step.is_decode
    assert shape(step) == [("a", 1), ("b", 1)]


def test_a_step_of_one_token_each_is_a_decode_whatever_the_tokens_are() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", prompt=1))
    step = scheduler.schedule()
    assert step is not None
    assert step.is_decode
    scheduler.commit(step, [7])
    scheduler.add(make_request("b", prompt=4))
    assert run_step(scheduler) == [("a", 1), ("b", 3)]
    step = scheduler.schedule()
    assert shape(step) == [("a", 1), ("b", 1)]
    assert step is not None
    assert step.is_decode


def test_chunks_of_one_token_are_decodes_and_sampled_at_the_end_only() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=1)
    scheduler.add(make_request("a", prompt=3))
    seen = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        seen.append((step.is_decode, step.rows[0].needs_sample))
        scheduler.commit(step, [7 if step.rows[0].needs_sample else None])
    assert seen == [(True, False), (True, False), (True, True)]


def test_a_started_prompt_goes_before_a_waiting_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", prompt=20))
    scheduler.add(make_request("b", prompt=20))
    assert run_step(scheduler) == [("a", 16)]
    assert run_step(scheduler) == [("a", 4), ("b", 12)]
    assert run_step(scheduler) == [("a", 1), ("b", 8)]


def test_max_num_seqs_holds_the_rest_back_in_order() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=64)
    for name in "abcd":
        scheduler.add(make_request(name, prompt=2, max_tokens=2 if name == "a" else 4))
    assert run_step(scheduler) == [("a", 2), ("b", 2)]
    assert run_step(scheduler) == [("a", 1), ("b", 1)]
    assert run_step(scheduler) == [("b", 1), ("c", 2)]


def test_a_request_that_does_not_fit_yet_waits_and_keeps_its_place() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=64)  # 5 usable blocks, 20 tokens
    scheduler.add(make_request("a", prompt=10, max_tokens=2))
    scheduler.add(make_request("large", prompt=10, max_tokens=2))
    scheduler.add(make_request("small", prompt=2, max_tokens=2))
    assert run_step(scheduler) == [("a", 10)]
    assert run_step(scheduler) == [("a", 1)]
    assert run_step(scheduler) == [("large", 10), ("small", 2)]


def test_blocks_are_taken_for_the_tokens_of_each_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    request = make_request("a", prompt=10, max_tokens=6)
    scheduler.add(request)
    num_blocks = []
    while scheduler.has_requests:
        num_blocks.append(len(request.block_ids))
        run_step(scheduler)
    assert num_blocks == [0, 2, 3, 3, 3, 4, 4]  # 6 tokens, 10, 11, 12, 13, 14, 15


@pytest.mark.parametrize(("prompt", "fits"), [(17, True), (18, False)])
def test_a_request_that_can_never_fit_is_refused(prompt: int, fits: bool) -> None:
    scheduler = make_scheduler(num_blocks=6)  # 20 tokens
    request = make_request("a", prompt=prompt, max_tokens=3)
    if fits:
        scheduler.add(request)
        return
    with pytest.raises(
        RequestTooLargeError, match=r"needs 6 KV blocks of 4 tokens .* the cache has 5; lower max_tokens"
    ):
        scheduler.add(request)
    assert not scheduler.has_requests


def test_abort_frees_blocks_of_running_and_forgets_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting, stays = make_request("a", 5), make_request("b", 5), make_request("c", 5)
    for request in (running, waiting, stays):
        scheduler.add(request)
    run_step(scheduler)
    dropped = scheduler.abort(["a", "b", "nobody"])
    assert dropped == [waiting, running]
    assert {request.finish_reason for request in dropped} == {"abort"}
    assert scheduler.allocator.num_free == scheduler.allocator.num_usable
    assert run_step(scheduler) == [("c", 5)]


@pytest.mark.parametrize("method", ["allocate", "share", "free"])
def test_books_torn_by_an_interrupt_are_made_anew_once_nobody_is_there(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler()
    for _ in range(2):  # the second one shares the blocks of the first, which stays for the third
        request = make_request("a", 9, max_tokens=1)
        scheduler.add(request)
        run_step(scheduler)
    original = getattr(scheduler.allocator, method)

    def interrupted(*args: object) -> None:
        original(*args)
        raise KeyboardInterrupt

    scheduler.add(make_request("a", 9, max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.allocator, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_step(scheduler)
    scheduler.abort(["a"])
    assert not scheduler.has_requests
    assert scheduler.allocator.num_free == scheduler.allocator.num_usable
    assert len(scheduler.allocator.prefix_cache) == 0
    scheduler.add(make_request("a", 9))
    assert run_step(scheduler) == [("a", 9)]


def test_an_abort_alone_keeps_the_prefix_cache() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9))
    run_step(scheduler)
    scheduler.abort(["a"])
    assert len(scheduler.allocator.prefix_cache) == 2


def test_a_step_that_is_not_committed_is_scheduled_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", prompt=3))
    run_step(scheduler)
    scheduler.add(make_request("b", prompt=20))
    first = shape(scheduler.schedule())
    assert shape(scheduler.schedule()) == first


def test_a_row_that_raises_keeps_what_others_finished_for_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    ends, stays, dropped = (make_request(name, prompt=3, max_tokens=n) for name, n in (("a", 1), ("b", 3), ("c", 1)))
    for request in (ends, dropped, stays):
        scheduler.add(request)
    step = scheduler.schedule()
    assert step is not None
    with monkeypatch.context() as patch:
        patch.setattr(stays, "append_token", lambda token_id, logprobs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.commit(step, [7, 7, 7])
    assert (ends.status, dropped.status) == (RequestStatus.FINISHED, RequestStatus.FINISHED)
    assert scheduler.running == [stays]
    scheduler.abort(["c"])
    again = scheduler.schedule()
    assert shape(again) == [("b", 3)]
    assert scheduler.commit(again, [7]) == [ends]
    assert run_step(scheduler) == [("b", 1)]


def test_commit_stops_at_end_of_sequence_and_frees() -> None:
    scheduler = make_scheduler()
    ends, goes_on = make_request("a", 3), make_request("b", 3)
    scheduler.add(ends)
    scheduler.add(goes_on)
    step = scheduler.schedule()
    assert step is not None
    assert scheduler.commit(step, [99, 5]) == [ends]
    assert ends.block_ids == []
    assert scheduler.running == [goes_on]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=14),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 20),
    num_blocks=st.integers(14, 30),
)
def test_every_request_ends_with_its_tokens_and_no_limit_is_passed(
    prompts: list[tuple[int, int]], max_num_seqs: int, extra_tokens: int, num_blocks: int
) -> None:
    scheduler = make_scheduler(num_blocks, max_num_seqs, max_num_seqs + extra_tokens)
    requests = [make_request(str(i), prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    started: list[str] = []
    while (step := scheduler.schedule()) is not None:
        assert sum(row.num_new_tokens for row in step.rows) <= scheduler.max_num_batched_tokens
        assert len(step.rows) <= len(scheduler.running) <= max_num_seqs
        assert all(row.num_new_tokens >= 1 for row in step.rows)
        assert {r.request_id for r in scheduler.running if r.num_pending_tokens == 1} <= {
            row.request.request_id for row in step.rows
        }
        started += [row.request.request_id for row in step.rows if row.request.request_id not in started]
        for row in step.rows:
            end = row.request.num_computed_tokens + row.num_new_tokens
            assert end <= len(row.request.block_ids) * BLOCK_SIZE
        scheduler.commit(step, [7 if row.needs_sample else None for row in step.rows])
    assert [request.output_token_ids for request in requests] == [[7] * max_tokens for _, max_tokens in prompts]
    assert started == [request.request_id for request in requests]
    assert scheduler.allocator.num_free == scheduler.allocator.num_usable
