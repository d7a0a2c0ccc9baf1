"""The step context: one step at a time, and a clear error where there is none."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from breakgraph.attention import AttentionMetadata, attend, current_step, live_token_count, use_step
from breakgraph.attention.sdpa import SdpaAttention
from interrupts import interrupted
from unit.attention.ragged import PLAIN, ragged_batch


@pytest.fixture
def metadata() -> AttentionMetadata:
    return SdpaAttention([PLAIN]).plan(ragged_batch(PLAIN, [2, 1], [0, 3]).step)


def test_a_step_is_seen_inside_and_gone_afterwards(metadata: AttentionMetadata) -> None:
    with use_step(metadata):
        assert current_step() is metadata
    with pytest.raises(RuntimeError, match="outside a step"):
        current_step()


def test_a_step_ends_with_an_exception_too(metadata: AttentionMetadata) -> None:
    with pytest.raises(KeyError), use_step(metadata):
        raise KeyError
    with use_step(metadata):
        pass


def test_a_step_that_is_planned_when_it_is_needed(metadata: AttentionMetadata) -> None:
    plans: list[AttentionMetadata] = []

    def plan() -> AttentionMetadata:
        plans.append(metadata)
        return metadata

    with use_step(plan):
        assert not plans
        with pytest.raises(RuntimeError, match="already in progress"), use_step(metadata):
            pass
        assert current_step() is metadata
        assert current_step() is metadata
        assert live_token_count(metadata.step.padded_num_tokens) is None
    assert plans == [metadata]
    with use_step(plan):
        live_token_count(metadata.step.padded_num_tokens)
    assert plans == [metadata] * 2
    with pytest.raises(RuntimeError, match="outside a step"):
        current_step()


def test_steps_do_not_nest(metadata: AttentionMetadata) -> None:
    with use_step(metadata):
        with pytest.raises(RuntimeError, match="already in progress"), use_step(metadata):
            pass
        assert current_step() is metadata


def test_a_step_is_over_wherever_the_user_interrupts_it(metadata: AttentionMetadata) -> None:
    def run() -> None:
        with use_step(lambda: metadata):
            current_step()

    points = []
    for point in interrupted(run):
        points.append(point)
        with pytest.raises(RuntimeError, match="outside a step"):
            current_step()
        with use_step(metadata):
            assert current_step() is metadata
    assert len(points) > 5


def test_other_threads_do_not_see_a_step(metadata: AttentionMetadata) -> None:
    seen: list[str] = []

    def ask() -> None:
        try:
            current_step()
        except RuntimeError as error:
            seen.append(str(error))

    with use_step(metadata):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert seen == ["attention was called outside a step; call the model inside `with use_step(metadata):`"]


def test_attention_outside_a_step_is_refused() -> None:
    batch = ragged_batch(PLAIN, [2], [0])
    with pytest.raises(RuntimeError, match="use_step"):
        attend(batch.q, batch.k, batch.v, batch.q.clone(), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 4}, "q_lens sum to 3, the step has 4"),
        ({"padded_num_tokens": 2}, "3 live tokens in a step of 2"),
        ({"seq_lens": (2,)}, "2 q_lens, 1 seq_lens"),
        ({"seq_lens": (1, 4)}, "1 <= new tokens <= total tokens"),
        ({"q_lens": (3, 0)}, "1 <= new tokens <= total tokens"),
    ],
)
def test_a_step_that_contradicts_itself(metadata: AttentionMetadata, change: dict[str, object], message: str) -> None:
    step = replace(metadata.step, padded_num_tokens=8)
    with pytest.raises(AssertionError, match=message):
        replace(step, **change)
