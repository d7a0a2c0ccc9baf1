from __future__ import annotations

import pytest

from breakgraph.errors import ConfigError
from breakgraph.runners.ladder import bucket_for, check_ladder, default_ladder, unused_buckets


def test_default_ladder_by_hand() -> None:
    assert default_ladder(1) == (1,)
    assert default_ladder(2) == (1, 2)
    assert default_ladder(8) == (1, 2, 4, 8)
    assert default_ladder(50) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 50)
    assert default_ladder(200) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200)


@pytest.mark.parametrize("top", [1, 3, 7, 8, 9, 63, 64, 65, 256, 1000, 2048, 8192, 12345])
def test_default_ladder_covers_every_size_closely(top: int) -> None:
    ladder = default_ladder(top)
    assert ladder[-1] == top
    assert list(ladder) == sorted(set(ladder))
    assert ladder[0] == 1
    for size in range(1, top + 1):
        bucket = bucket_for(ladder, size)
        assert bucket is not None
        assert size <= bucket <= max(size + 7, size * 1.25)
    assert len(ladder) <= 45


@pytest.mark.parametrize("top", [0, -1])
def test_default_ladder_needs_a_size(top: int) -> None:
    with pytest.raises(ConfigError, match=f"1 or more, got {top}"):
        default_ladder(top)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], "at least one bucket, got none"),
        ([0, 4], "positive integers, got 0"),
        ([-8], "positive integers, got -8"),
        ([True, 4], "positive integers, got True"),
        ([4.0], r"positive integers, got 4\.0"),
        (["8"], "positive integers, got '8'"),
        ([4, 4], "without repeats, got 4 after 4"),
        ([8, 4], "without repeats, got 4 after 8"),
    ],
)
def test_explicit_ladder_errors_name_the_option(buckets: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"prefill_buckets: expected .*{message}"):
        check_ladder(buckets, "prefill_buckets")


def test_explicit_ladder_is_kept_as_given() -> None:
    assert check_ladder([3, 5, 100], "buckets") == (3, 5, 100)


@pytest.mark.parametrize(
    ("ladder", "top", "unused"),
    [
        ((4, 8), 8, []),
        ((2, 4), 8, []),
        # The first bucket above the top serves the sizes below it.
        ((64, 128), 100, []),
        ((4, 8, 16, 32), 6, [16, 32]),
        ((4, 8, 16, 32), 8, [16, 32]),
    ],
)
def test_unused_buckets(ladder: tuple[int, ...], top: int, unused: list[int]) -> None:
    assert unused_buckets(ladder, top) == unused


def test_bucket_for() -> None:
    ladder = (2, 4, 8)
    assert [bucket_for(ladder, size) for size in range(1, 10)] == [2, 2, 4, 4, 8, 8, 8, 8, None]
