"""Which steps are replayed, and the reason of each that is not."""

from __future__ import annotations

import pytest

from breakgraph.runners import EagerReason, admit
from unit.runners.fakes import Setup, decode_setup, prefill_setup


def ask(setup: Setup, num_tokens: int, num_reqs: int) -> EagerReason | None:
    return admit(setup.runner.spec, setup.backend, num_tokens, num_reqs)


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "reason"),
    [
        (1, 1, None),
        (16, 4, None),
        (17, 1, EagerReason.TOO_MANY_TOKENS),
        (16, 5, EagerReason.TOO_MANY_REQUESTS),
        (5, 5, EagerReason.TOO_MANY_REQUESTS),
    ],
)
def test_prefill(num_tokens: int, num_reqs: int, reason: EagerReason | None) -> None:
    assert ask(prefill_setup().ready(), num_tokens, num_reqs) is reason


@pytest.mark.parametrize(("num_reqs", "reason"), [(1, None), (8, None), (9, EagerReason.TOO_MANY_REQUESTS)])
def test_decode(num_reqs: int, reason: EagerReason | None) -> None:
    assert ask(decode_setup().ready(), num_reqs, num_reqs) is reason


def test_nothing_captured() -> None:
    assert ask(prefill_setup(), 1, 1) is EagerReason.NOT_CAPTURED
    assert ask(prefill_setup(), 17, 1) is EagerReason.TOO_MANY_TOKENS


def test_one_bucket_missing() -> None:
    setup = prefill_setup().ready()
    setup.backend.release(setup.runner.spec.key(8))
    assert [ask(setup, size, 1) for size in (4, 8, 9)] == [None, EagerReason.NOT_CAPTURED, None]


def test_a_backend_that_does_not_capture_takes_nothing() -> None:
    setup = prefill_setup("eager").ready()
    assert {ask(setup, size, 1) for size in (1, 16, 17)} == {EagerReason.BACKEND_EAGER}


def test_asking_changes_nothing() -> None:
    setup = prefill_setup().ready()
    for num_tokens in range(1, 20):
        ask(setup, num_tokens, 1)
    assert setup.family.events == []
    assert setup.forward.calls == []
    assert setup.runner.stats.to_dict()["num_eager_steps_by_reason"] == {}
