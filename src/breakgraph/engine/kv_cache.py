"""How many KV blocks there are, and whose they are. Block 0 belongs to nobody: padding writes there."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.engine.prefix_cache import PrefixCache
from breakgraph.errors import ConfigError

logger = logging.getLogger(__name__)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Hands out block numbers 1 .. num_blocks - 1, and counts the requests that use each.

    A block is in use, free, or idle: used by nobody, but still found by its tokens in `prefix_cache`. Free blocks are
    handed out first, then idle ones, the longest unused first. All or nothing; a block that is freed more often than it
    was taken is an error.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"the KV cache needs 2 blocks at least (block 0 is reserved for padding), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Takes every block back, whoever has it, and forgets what is in them."""
        self.prefix_cache = PrefixCache()
        # The lowest numbers are handed out first, so that a short run touches little memory.
        self._free = list(range(self.num_blocks - 1, RESERVED_BLOCK, -1))
        # Not a dict, whose first key is slow to find once many before it are gone.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_users = [0] * self.num_blocks

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return len(self._free) + len(self._idle)

    def num_users(self, block: int) -> int:
        return self._num_users[block]

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one user each."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked for, {self.num_free} free"
        while len(self._free) < num_blocks:
            self._evict()
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._num_users[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a user to each of these cached blocks."""
        for block in blocks:
            assert block in self.prefix_cache, f"block {block} is not cached"
            self._idle.pop(block, None)
            self._num_users[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes a user from each of a request's blocks, given in the order of its tokens."""
        # From the last: what follows a block is of no use without it, so it is evicted earlier.
        for block in reversed(blocks):
            assert self._num_users[block] > 0, f"block {block} is not in use"
            self._num_users[block] -= 1
            if self._num_users[block] > 0:
                continue
            if block in self.prefix_cache:
                self._idle[block] = None
            else:
                self._free.append(block)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. Blocks in use stay with their users, and are not cached when those go."""
        self.prefix_cache.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _evict(self) -> None:
        for block in self.prefix_cache.remove(next(iter(self._idle))):
            # A block below it may be in use: that one is free once its user goes.
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)


@dataclass(frozen=True, kw_only=True)
class KVDemand:
    """What decides the number of KV blocks."""

    bytes_per_block: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    fill_memory: bool
    """Blocks that cannot be in use are wanted too: they keep prefixes."""

    @property
    def blocks_per_seq(self) -> int:
        return num_blocks_for(self.max_model_len, self.block_size)

    @property
    def useful_blocks(self) -> int:
        """More could never be in use at the same time: every request at its longest, and the reserved block."""
        return self.max_num_seqs * self.blocks_per_seq + 1


def choose_num_blocks(demand: KVDemand, available_bytes: int, override: int | None) -> int:
    """Blocks to allocate, the reserved one included: `override`, or as many as are wanted and fit.

    Raises ConfigError when not even one request of max_model_len would fit, unless `override` says so.
    """
    if override is not None:
        if override - 1 < demand.blocks_per_seq:
            logger.warning(
                "num_gpu_blocks_override=%d holds %d tokens, less than max_model_len=%d; longer requests are refused",
                override, (override - 1) * demand.block_size, demand.max_model_len,
            )  # fmt: skip
        return override
    fitting = max(0, available_bytes // demand.bytes_per_block)
    if fitting - 1 < demand.blocks_per_seq:
        raise ConfigError(
            f"max_model_len={demand.max_model_len} needs {demand.blocks_per_seq + 1} KV blocks of "
            f"{demand.bytes_per_block} bytes, {fitting} fit in the {available_bytes} bytes left for them; lower "
            "max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    num_blocks = fitting if demand.fill_memory else min(demand.useful_blocks, fitting)
    logger.info(
        "%d KV blocks of %d tokens, %.2f GiB: %s",
        num_blocks, demand.block_size, num_blocks * demand.bytes_per_block / 2**30,
        "as many as max_num_seqs and max_model_len can use" if num_blocks < fitting else "as many as fit",
    )  # fmt: skip
    return num_blocks
