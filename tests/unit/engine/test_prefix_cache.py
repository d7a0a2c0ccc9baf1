"""The prefix cache and the allocator together, against a plain list of everything that happened."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from breakgraph.engine.kv_cache import BlockAllocator
from breakgraph.engine.prefix_cache import BlockTokens, PrefixCache, PrefixNode

A, B, C = (1, 2), (3, 4), (5, 6)


def insert_all(cache: PrefixCache, adapter_id: str | None, tokens: list[BlockTokens], blocks: list[int]) -> None:
    _, node = cache.match(adapter_id, [])
    for token_ids, block in zip(tokens, blocks, strict=True):
        node = cache.insert(node, token_ids, block)


class TestTree:
    def test_the_longest_cached_beginning_is_found(self) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A, B, C], [7, 8, 9])
        insert_all(cache, None, [A, C], [7, 4])
        assert [cache.match(None, tokens)[0] for tokens in ([A, B, C, A], [A, C, C], [A], [B], [])] == [
            [7, 8, 9], [7, 4], [7], [], [],
        ]  # fmt: skip

    def test_the_same_tokens_after_others_are_another_block(self) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A, C], [1, 2])
        insert_all(cache, None, [B, C], [3, 4])
        assert cache.match(None, [B, C])[0] == [3, 4]

    def test_adapters_share_nothing(self) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A, B], [1, 2])
        insert_all(cache, "french", [A], [3])
        assert [cache.match(adapter, [A, B])[0] for adapter in (None, "french", "german", "")] == [[1, 2], [3], [], []]

    def test_equal_tokens_keep_the_block_that_was_first(self) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A, B], [1, 2])
        insert_all(cache, None, [A, B, C], [3, 4, 5])
        assert cache.match(None, [A, B, C])[0] == [1, 2, 5]
        assert [block in cache for block in range(1, 6)] == [True, True, False, False, True]

    def test_with_a_block_goes_all_below_it(self) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A, B, C], [1, 2, 3])
        insert_all(cache, None, [A, C], [1, 4])
        assert cache.remove(2) == [2, 3]
        assert (len(cache), cache.match(None, [A, B, C])[0], cache.match(None, [A, C])[0]) == (2, [1], [1, 4])

    @pytest.mark.parametrize("how", ["remove", "clear"])
    def test_nothing_is_put_below_what_has_left(self, how: str) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A, B], [1, 2])
        _, node = cache.match(None, [A, B])
        assert (cache.remove(1) if how == "remove" else cache.clear()) == [1, 2]
        assert cache.insert(node, C, 3) is node
        insert_all(cache, None, [A, B], [4, 5])
        assert cache.match(None, [A, B, C])[0] == [4, 5]
        assert len(cache) == 2

    def test_a_block_is_cached_once(self) -> None:
        cache = PrefixCache()
        insert_all(cache, None, [A], [1])
        with pytest.raises(AssertionError, match="block 1 is cached already"):
            insert_all(cache, None, [B], [1])


class TestAllocator:
    def take(self, allocator: BlockAllocator, tokens: list[BlockTokens]) -> list[int]:
        blocks = allocator.allocate(len(tokens))
        insert_all(allocator.prefix_cache, None, tokens, blocks)
        return blocks

    def test_a_cached_block_outlives_its_user_until_it_is_needed(self) -> None:
        allocator = BlockAllocator(5)
        blocks = self.take(allocator, [A, B])
        allocator.free(blocks)
        assert (allocator.num_free, len(allocator.prefix_cache)) == (4, 2)
        assert not set(allocator.allocate(2)) & set(blocks)
        assert len(allocator.prefix_cache) == 2
        assert set(allocator.allocate(2)) == set(blocks)
        assert len(allocator.prefix_cache) == 0

    def test_the_end_of_a_prefix_is_evicted_before_its_beginning(self) -> None:
        allocator = BlockAllocator(4)
        first, second, third = blocks = self.take(allocator, [A, B, C])
        allocator.free(blocks)
        assert [allocator.allocate(1) for _ in range(3)] == [[third], [second], [first]]

    def test_the_longest_unused_is_evicted_first(self) -> None:
        allocator = BlockAllocator(4)
        a, b, c = (self.take(allocator, [tokens]) for tokens in (A, B, C))
        for blocks in (a, b, c):
            allocator.free(blocks)
        allocator.share(a)
        allocator.free(a)
        assert [allocator.allocate(1) for _ in range(3)] == [b, c, a]

    def test_a_shared_block_is_not_evicted_until_its_last_user_goes(self) -> None:
        allocator = BlockAllocator(3)
        shared = self.take(allocator, [A])
        allocator.share(shared)
        allocator.free(shared)
        assert (allocator.num_users(shared[0]), allocator.num_free) == (1, 1)
        allocator.free(shared)
        assert (allocator.num_users(shared[0]), allocator.num_free) == (0, 2)
        with pytest.raises(AssertionError, match="is not in use"):
            allocator.free(shared)

    def test_a_block_that_is_not_cached_cannot_be_shared(self) -> None:
        allocator = BlockAllocator(3)
        blocks = allocator.allocate(1)
        with pytest.raises(AssertionError, match=f"block {blocks[0]} is not cached"):
            allocator.share(blocks)

    @pytest.mark.parametrize("how", ["reset", "forget_prefixes"])
    def test_prefixes_are_forgotten(self, how: str) -> None:
        allocator = BlockAllocator(6)
        used, idle = self.take(allocator, [A]), self.take(allocator, [B, C])
        allocator.free(idle)
        getattr(allocator, how)()
        assert (len(allocator.prefix_cache), allocator.prefix_cache.match(None, [A])[0]) == (0, [])
        assert allocator.num_free == (5 if how == "reset" else 4)
        if how == "forget_prefixes":
            allocator.free(used)
        assert sorted(allocator.allocate(5)) == [1, 2, 3, 4, 5]


@dataclass
class Holder:
    """One request: its blocks, how many of them it has filled, and where the next goes in both worlds."""

    adapter_id: str | None
    tokens: list[BlockTokens]
    blocks: list[int]
    num_filled: int
    node: PrefixNode
    anchor: tuple[int, int] | None
    """(block, serial number) of the model's entry that the next one follows; None is the root."""
    epoch: int


@dataclass
class Entry:
    adapter_id: str | None
    tokens: tuple[BlockTokens, ...]
    serial: int


ADAPTERS = st.sampled_from([None, "x"])
TOKENS = st.lists(st.sampled_from([A, B]), min_size=1, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    """The model keeps whole prefixes in a flat table, and idle blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(9)
        self.holders: list[Holder] = []
        self.entries: dict[int, Entry] = {}
        self.idle: list[int] = []
        self.free = set(range(1, 9))
        self.serials = itertools.count()
        self.epoch = 0

    def longest(self, adapter_id: str | None, tokens: list[BlockTokens]) -> list[int]:
        by_prefix = {(entry.adapter_id, entry.tokens): block for block, entry in self.entries.items()}
        found = []
        for end in range(1, len(tokens) + 1):
            block = by_prefix.get((adapter_id, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def evict(self) -> None:
        top = self.entries[self.idle[0]]
        for block, entry in list(self.entries.items()):
            if entry.adapter_id == top.adapter_id and entry.tokens[: len(top.tokens)] == top.tokens:
                del self.entries[block]
                if block in self.idle:
                    self.idle.remove(block)
                    self.free.add(block)

    @rule(adapter_id=ADAPTERS, tokens=TOKENS)
    def start(self, adapter_id: str | None, tokens: list[BlockTokens]) -> None:
        cached, node = self.allocator.prefix_cache.match(adapter_id, tokens)
        assert cached == self.longest(adapter_id, tokens)
        needed = len(tokens) - len(cached)
        if not self.allocator.can_allocate(needed + sum(block in self.idle for block in cached)):
            return
        self.allocator.share(cached)
        self.idle = [block for block in self.idle if block not in cached]
        blocks = self.allocator.allocate(needed)
        while len(self.free) < needed:
            self.evict()
        assert set(blocks) <= self.free
        self.free -= set(blocks)
        anchor = (cached[-1], self.entries[cached[-1]].serial) if cached else None
        self.holders.append(Holder(adapter_id, tokens, cached + blocks, len(cached), node, anchor, self.epoch))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 8))
    def fill(self, which: int) -> None:
        holder = self.holders[which % len(self.holders)]
        if holder.num_filled == len(holder.blocks):
            return
        index, block = holder.num_filled, holder.blocks[holder.num_filled]
        holder.num_filled += 1
        holder.node = self.allocator.prefix_cache.insert(holder.node, holder.tokens[index], block)
        if holder.anchor is None:
            is_alive = holder.epoch == self.epoch
        else:
            entry = self.entries.get(holder.anchor[0])
            is_alive = entry is not None and entry.serial == holder.anchor[1]
        if is_alive:
            prefix = holder.tokens[: index + 1]
            found = self.longest(holder.adapter_id, prefix)
            if len(found) < len(prefix):
                self.entries[block] = Entry(holder.adapter_id, tuple(prefix), next(self.serials))
                found = [block]
            holder.anchor = (found[-1], self.entries[found[-1]].serial)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 8))
    def finish(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        self.allocator.free(holder.blocks)
        still_used = {block for other in self.holders for block in other.blocks}
        for block in reversed(holder.blocks):
            if block in still_used:
                continue
            if block in self.entries:
                self.idle.append(block)
            else:
                self.free.add(block)

    @rule()
    def forget(self) -> None:
        self.allocator.forget_prefixes()
        self.free |= set(self.idle)
        self.idle.clear()
        self.entries.clear()
        self.epoch += 1

    @invariant()
    def books_agree(self) -> None:
        users = Counter(block for holder in self.holders for block in holder.blocks)
        assert [self.allocator.num_users(block) for block in range(9)] == [users[block] for block in range(9)]
        assert {block for block in range(9) if block in self.allocator.prefix_cache} == self.entries.keys()
        assert self.allocator.num_free == len(self.free) + len(self.idle) == 8 - len(users)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
