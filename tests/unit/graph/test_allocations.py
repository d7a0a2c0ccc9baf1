"""Reading torch's record of the allocator: which of its entries are a pool's."""

from __future__ import annotations

from breakgraph.graph.cuda_pool import allocations_within

POOL = [(1000, 2000), (5000, 6000)]


def entry(action: str, address: int, size: int) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0}


def test_a_tensor_is_noted_when_it_comes_and_when_it_goes() -> None:
    entries = [
        entry("alloc", 1000, 300),
        entry("alloc", 5000, 900),
        entry("alloc", 3000, 700),  # not the pool's
        entry("free_requested", 1000, 300),
        entry("free_completed", 1000, 300),
        entry("free_completed", 3000, 700),
        entry("alloc", 1000, 500),  # the same place, another tensor
        entry("free_completed", 5000, 900),
    ]
    events = allocations_within(entries, POOL)
    assert [size for _, size in events] == [300, 900, 300, 500, 900]
    numbers = [number for number, _ in events]
    assert (numbers[0], numbers[1]) == (numbers[2], numbers[4])
    assert len(set(numbers)) == 3


def test_what_lay_there_before_the_driver_had_the_memory_back_is_not_the_pools() -> None:
    warm_up = [
        entry("alloc", 900, 400),  # of a segment that reaches into where the pool's will be
        entry("alloc", 1300, 600),
        entry("free_completed", 1300, 600),
        entry("alloc", 1500, 100),  # given back after this record ends
        entry("segment_free", 900, 1200),
    ]
    capture = [entry("segment_alloc", 1000, 1000), entry("alloc", 1500, 200), entry("free_completed", 1500, 200)]
    events = allocations_within([*warm_up, *capture], POOL)
    assert [size for _, size in events] == [200, 200]
    assert len({number for number, _ in events}) == 1


def test_memory_that_goes_back_elsewhere_changes_nothing() -> None:
    entries = [entry("alloc", 1000, 300), entry("segment_free", 3000, 1000), entry("free_completed", 1000, 300)]
    assert [size for _, size in allocations_within(entries, POOL)] == [300, 300]
