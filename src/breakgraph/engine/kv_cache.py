"""How many KV blocks there are, and whose they are. Block 0 belongs to nobody: padding writes there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.errors import ConfigError

logger = logging.getLogger(__name__)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockAllocator:
    """Hands out block numbers 1 .. num_blocks - 1. All or nothing; a block that is freed twice is an error."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"the KV cache needs 2 blocks at least (block 0 is reserved for padding), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Takes every block back, whoever has it."""
        # The lowest numbers are handed out first, so that a short run touches little memory.
        self._free = list(range(self.num_blocks - 1, RESERVED_BLOCK, -1))
        self._is_free = [True] * self.num_blocks

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            assert not self._is_free[block], f"block {block} is not in use"
            self._is_free[block] = True
            self._free.append(block)


@dataclass(frozen=True, kw_only=True)
class KVDemand:
    """What decides the number of KV blocks."""

    bytes_per_block: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    @property
    def blocks_per_seq(self) -> int:
        return num_blocks_for(self.max_model_len, self.block_size)

    @property
    def useful_blocks(self) -> int:
        """More could never be in use at the same time: every request at its longest, and the reserved block."""
        return self.max_num_seqs * self.blocks_per_seq + 1


def choose_num_blocks(demand: KVDemand, available_bytes: int, override: int | None) -> int:
    """Blocks to allocate, the reserved one included: `override`, or as many as are useful and fit.

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
    num_blocks = min(demand.useful_blocks, fitting)
    logger.info(
        "%d KV blocks of %d tokens, %.2f GiB: %s",
        num_blocks, demand.block_size, num_blocks * demand.bytes_per_block / 2**30,
        "as many as max_num_seqs and max_model_len can use" if num_blocks < fitting else "as many as fit",
    )  # fmt: skip
    return num_blocks
