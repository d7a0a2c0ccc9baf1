import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.engine.kv_cache import BlockAllocator, KVDemand, choose_num_blocks, num_blocks_for
from breakgraph.errors import ConfigError


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 16) == blocks


def test_the_reserved_block_is_never_handed_out() -> None:
    allocator = BlockAllocator(5)
    assert sorted(allocator.allocate(4)) == [1, 2, 3, 4]
    assert not allocator.can_allocate(1)


def test_one_block_is_too_few() -> None:
    with pytest.raises(ConfigError, match="2 blocks at least"):
        BlockAllocator(1)


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    with pytest.raises(AssertionError, match="4 blocks asked for, 3 free"):
        allocator.allocate(4)
    assert allocator.num_free == 3


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_not_in_use_cannot_be_freed(block: int) -> None:
    with pytest.raises(AssertionError, match="not in use"):
        BlockAllocator(4).free([block])


def test_reset_takes_all_blocks_back() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    allocator.reset()
    assert sorted(allocator.allocate(3)) == [1, 2, 3]


@given(st.lists(st.integers(min_value=-5, max_value=6), max_size=40))
def test_no_block_has_two_owners(requests: list[int]) -> None:
    allocator, held = BlockAllocator(12), []
    for size in requests:
        if size < 0 and held:
            allocator.free(held.pop(size % len(held)))
        elif size >= 0 and allocator.can_allocate(size):
            held.append(allocator.allocate(size))
        owned = [block for blocks in held for block in blocks]
        assert len(owned) == len(set(owned))
        assert 0 not in owned
        assert len(owned) + allocator.num_free == allocator.num_usable


DEMAND = KVDemand(bytes_per_block=1000, block_size=16, max_model_len=100, max_num_seqs=3, fill_memory=False)


@pytest.mark.parametrize(
    ("available", "override", "expected"),
    [
        (1_000_000, None, 22),  # 3 requests of 7 blocks, and the reserved one
        (21_999, None, 21),
        (8_000, None, 8),
        (0, 50, 50),
        (1_000_000, 3, 3),
    ],
)
def test_number_of_blocks(available: int, override: int | None, expected: int) -> None:
    assert choose_num_blocks(DEMAND, available, override) == expected


@pytest.mark.parametrize(("override", "expected"), [(None, 1000), (50, 50)])
def test_number_of_blocks_where_prefixes_may_fill_the_memory(override: int | None, expected: int) -> None:
    assert choose_num_blocks(dataclasses.replace(DEMAND, fill_memory=True), 1_000_000, override) == expected


@pytest.mark.parametrize("available", [7_999, 0, -5])
def test_no_room_for_one_whole_context_is_refused(available: int) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=100 needs 8 KV blocks .* lower max_model_len"):
        choose_num_blocks(DEMAND, available, None)


def test_an_override_below_the_context_is_said(caplog: pytest.LogCaptureFixture) -> None:
    choose_num_blocks(DEMAND, 0, 4)
    assert "num_gpu_blocks_override=4 holds 48 tokens, less than max_model_len=100" in caplog.text
