"""What makes one phase different from another, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
import torch

from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.errors import ConfigError
from breakgraph.graph import ShapeKey
from breakgraph.runners.batch import Ints, StepBatch
from breakgraph.runners.ladder import bucket_for

_least, _greatest = np.minimum.reduce, np.maximum.reduce
"""What arrays have as methods too, which go through some Python."""
RESERVED_SLOT = 0
"""The KV slot that padded tokens write to, in the reserved block."""

Axis = Literal["tokens", "requests", "request_bounds", "step"]
"""One row a token, a request, a boundary between requests (one more than requests), or one row in all."""


class Pad(Enum):
    """Pad policies that are not a plain value."""

    REPEAT_LAST = "repeat_last"


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One static input. Its values are the :class:`StepBatch` attribute of the same name."""

    name: str
    dtype: torch.dtype
    axis: Axis
    pad: int | Pad
    """What the rows (and columns) past the live ones hold, rewritten on every step."""
    tail: tuple[int, ...] = ()
    """Shape of one row."""


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """A phase: how its steps are sized, padded and admitted."""

    phase: str
    size_axis: Axis
    """What a bucket counts."""
    ladder: tuple[int, ...]
    max_size: int
    """The largest step the scheduler can send, along size_axis."""
    max_num_seqs: int
    """Requests in a step, at most; and room for requests in a bucket, unless request_slots says less."""
    fields: tuple[FieldSpec, ...]
    """What graphs read, in the rows of a bucket."""
    break_fields: tuple[FieldSpec, ...] = ()
    """What breaks read, and no graph: as many rows as the step has, the last axis as wide as its longest row. They may
    have the names of the last of the fields, which steps with breaks then have no use for."""
    tokens_per_req: int | None
    """Fixed tokens of each request, or None where they vary. Fixed when size_axis is requests."""
    attention_support: frozenset[str]
    """Answers of an attention's ``graph_support(phase)`` that allow it inside a graph; empty: none is allowed there."""
    num_blocks: int
    block_size: int
    max_blocks_per_seq: int
    request_slots: int | None = None
    """Rows of request metadata in a bucket that holds them; None: metadata is new on every step."""

    def __post_init__(self) -> None:
        for field in (*self.fields, *self.break_fields):
            assert hasattr(StepBatch, field.name), f"{self.phase}: field {field.name!r} is not one of StepBatch"
        assert self.size_axis == "tokens" or self.tokens_per_req is not None, f"{self.phase}: requests of unknown size"

    @property
    def max_model_len(self) -> int:
        """The longest request that a block table holds, in tokens."""
        return self.max_blocks_per_seq * self.block_size

    @property
    def holds_every_step(self) -> bool:
        """Whether the last bucket has room for whatever the scheduler can send."""
        num_tokens = self.max_size * (self.tokens_per_req or 1) if self.size_axis == "requests" else self.max_size
        return self.bucket_for(num_tokens, min(num_tokens, self.max_num_seqs)) is not None

    def key(self, size: int) -> ShapeKey:
        """The identity of the plan for one bucket."""
        return ShapeKey(self.phase, size)

    def num_rows(self, axis: Axis, size: int) -> int:
        """Rows along ``axis`` in a bucket of ``size``."""
        if axis == "step":
            return 1
        if self.size_axis == "requests":
            tokens, requests = size * (self.tokens_per_req or 1), size
        else:
            tokens, requests = size, min(size, self.request_slots or self.max_num_seqs)
        return tokens if axis == "tokens" else requests + (axis == "request_bounds")

    def bucket_for(self, num_tokens: int, num_reqs: int) -> int | None:
        """The smallest bucket with room for both, or None. A batch has no more requests than tokens."""
        bucket = bucket_for(self.ladder, num_tokens if self.size_axis == "tokens" else num_reqs)
        fits = bucket is not None and num_reqs <= self.num_rows("requests", bucket)
        return bucket if fits else None

    def check(self, batch: StepBatch) -> None:
        """Raises ConfigError where ``batch`` does not fit this phase or the KV cache. Touches nothing."""
        batch.check()
        if self.tokens_per_req is not None:
            for index, q_len in enumerate(batch.q_lens):
                if q_len != self.tokens_per_req:
                    raise ConfigError(
                        f"{self.phase}: expected {self.tokens_per_req} new tokens in request {index}, got {q_len}"
                    )
        slots = np.asarray(batch.slot_mapping)
        first, end = self.block_size, self.num_blocks * self.block_size
        if not first <= _least(slots) <= _greatest(slots) < end:
            wrong = int(((slots < first) | (slots >= end)).argmax())
            raise ConfigError(
                f"{self.phase}: slot_mapping[{wrong}]: expected {first} <= slot < {end} (block {RESERVED_BLOCK} is "
                f"reserved for padding), got {slots[wrong]}"
            )
        self._check_block_tables(batch)

    def _check_block_tables(self, batch: StepBatch) -> None:
        self._check_block_numbers(batch.block_tables)
        end = 0
        requests = zip(batch.q_lens, batch.seq_lens, batch.block_tables, strict=True)
        for index, (q_len, seq_len, table) in enumerate(requests):
            end += q_len
            needed = (seq_len - 1) // self.block_size + 1  # unsigned integers have no minus
            if not needed <= len(table) <= self.max_blocks_per_seq:
                raise ConfigError(
                    f"{self.phase}: block_tables[{index}]: expected {needed} (seq_len {seq_len}) to "
                    f"{self.max_blocks_per_seq} (max_model_len) blocks, got {len(table)}"
                )
            # One comparison a request that catches a table of another request before it becomes a wrong answer.
            slot = int(table[needed - 1]) * self.block_size + (seq_len - 1) % self.block_size
            if batch.slot_mapping[end - 1] != slot:
                raise ConfigError(
                    f"{self.phase}: request {index}: its block table puts its last token in slot {slot}, "
                    f"slot_mapping says {batch.slot_mapping[end - 1]}"
                )

    def _check_block_numbers(self, tables: Sequence[Ints]) -> None:
        """Of all requests at once."""
        blocks = np.concatenate(tables) if len(tables) > 1 else np.asarray(tables[0])
        if blocks.size and not 0 <= _least(blocks) <= _greatest(blocks) < self.num_blocks:
            at = int(((blocks < 0) | (blocks >= self.num_blocks)).argmax())
            index = int(np.searchsorted(np.cumsum([len(table) for table in tables]), at, side="right"))
            raise ConfigError(
                f"{self.phase}: block_tables[{index}]: expected 0 <= value < {self.num_blocks}, got {tables[index]}"
            )

    def dummy_batch(self, size: int) -> StepBatch:
        """A step that fills a bucket of ``size`` and writes to the reserved slot only: longest requests, no prefix."""
        num_tokens = self.num_rows("tokens", size)
        longest = self.tokens_per_req or self.max_model_len
        num_reqs = min(-(-num_tokens // longest), self.num_rows("requests", size))
        q_lens = [min(longest, num_tokens - start) for start in range(0, num_reqs * longest, longest)]
        positions: list[int] = [position for q_len in q_lens for position in range(q_len)]
        return StepBatch(
            input_ids=[0] * len(positions),
            positions=positions,
            slot_mapping=[RESERVED_SLOT] * len(positions),
            q_lens=q_lens,
            seq_lens=q_lens,
            block_tables=[[RESERVED_BLOCK] * -(-q_len // self.block_size) for q_len in q_lens],
            logits_rows=last_rows(q_lens),
        )

    def longest_batch(self, size: int, num_reqs: int) -> StepBatch:
        """A step of a bucket of ``size`` whose requests, ``num_reqs`` of them if the bucket has room, are as long as
        they can be: all but this step's tokens are cached. Writes to the reserved slot and reads the reserved block."""
        num_reqs = min(num_reqs, self.num_rows("requests", size))
        num_tokens = min(self.num_rows("tokens", size), num_reqs * (self.tokens_per_req or self.max_model_len))
        q_lens = [num_tokens // num_reqs + (index < num_tokens % num_reqs) for index in range(num_reqs)]
        positions = [position for q_len in q_lens for position in range(self.max_model_len - q_len, self.max_model_len)]
        return StepBatch(
            input_ids=[0] * num_tokens,
            positions=positions,
            slot_mapping=[RESERVED_SLOT] * num_tokens,
            q_lens=q_lens,
            seq_lens=[self.max_model_len] * num_reqs,
            block_tables=[[RESERVED_BLOCK] * self.max_blocks_per_seq] * num_reqs,
            logits_rows=last_rows(q_lens),
        )


def last_rows(q_lens: Ints) -> list[int]:
    """Index of each request's last token, requests back to back."""
    return [int(end) - 1 for end in np.cumsum(q_lens)]
