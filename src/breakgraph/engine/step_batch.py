"""From scheduled rows to a StepBatch, before the step or while the one before it still runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from breakgraph.engine.request import Request
from breakgraph.engine.scheduler import ScheduledStep
from breakgraph.runners import StepBatch


def build_batch(step: ScheduledStep, block_size: int) -> StepBatch:
    """Rows back to back. Block tables reach no further than each request's tokens after this step."""
    input_ids: list[int] = []
    starts, seq_lens, block_tables = [], [], []
    for row in step.rows:
        request = row.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + row.num_new_tokens
        input_ids += request.pending_token_ids(row.num_new_tokens)
        starts.append(start)
        seq_lens.append(end)
        block_tables.append(request.block_table()[: -(-end // block_size)])
    q_lens = [row.num_new_tokens for row in step.rows]
    # All rows at once: a step of many requests is built while the device waits.
    ends = np.cumsum(q_lens)
    positions = np.arange(len(input_ids)) + np.repeat(np.asarray(starts) - (ends - q_lens), q_lens)
    table_starts = np.cumsum([0, *map(len, block_tables[:-1])])
    blocks = np.concatenate(block_tables)[positions // block_size + np.repeat(table_starts, q_lens)]
    return StepBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        q_lens=q_lens,
        seq_lens=seq_lens,
        block_tables=block_tables,
        logits_rows=(ends - 1).tolist(),
    )


@dataclass(frozen=True)
class PreparedRow:
    """What was taken for granted of one request; `block_ids` is its own list, which a preemption replaces."""

    request: Request
    position: int
    block_ids: list[int]

    @property
    def holds(self) -> bool:
        """Whether it is so by now, with everything before it booked."""
        return self.request.num_computed_tokens == self.position and self.request.block_ids is self.block_ids


class PreparedDecode:
    """The decode step that follows a step if nothing happens but that requests end: all of it but the tokens.

    Made while the device runs that step, of blocks that the requests have by then.

    Attributes:
        rows: in the order of that step.
        lacks_blocks: whether a request goes on that has no block for its next token.
    """

    def __init__(
        self, rows: list[PreparedRow], slots: NDArray[np.int64], block_tables: list[NDArray[np.int64]],
        *, lacks_blocks: bool,
    ) -> None:  # fmt: skip
        self.rows = rows
        self.lacks_blocks = lacks_blocks
        self._slots = slots
        self._block_tables = block_tables

    @classmethod
    def after(cls, step: ScheduledStep, block_size: int) -> PreparedDecode:
        """Of the requests that `step` gives a token, without those that this token ends for sure or that lack a block.

        Nothing of the step is booked yet.
        """
        rows, blocks, block_tables, lacks_blocks = [], [], [], False
        for row in step.rows:
            request, position = row.request, row.request.num_computed_tokens + row.num_new_tokens
            last = position // block_size
            if not row.needs_sample or request.ends_by_next_token:
                continue
            if last >= len(request.block_ids):
                lacks_blocks = True
                continue
            rows.append(PreparedRow(request, position, request.block_ids))
            blocks.append(request.block_ids[last])
            block_tables.append(request.block_table()[: last + 1])
        positions = np.asarray([row.position for row in rows], dtype=np.int64)
        slots = np.asarray(blocks, dtype=np.int64) * block_size + positions % block_size
        return cls(rows, slots, block_tables, lacks_blocks=lacks_blocks)

    def batch(self, step: ScheduledStep) -> StepBatch | None:
        """The batch of `step`; None when it is another one than was prepared."""
        if not step.is_decode:
            return None
        place_of = {row.request.request_id: place for place, row in enumerate(self.rows)}
        places = [place_of.get(row.request.request_id, -1) for row in step.rows]
        if -1 in places or not all(self.rows[place].holds for place in places):
            return None
        return self._batch(places, [token for row in step.rows for token in row.request.pending_token_ids(1)])

    def batch_of_all(self, token_ids_R: Tensor) -> StepBatch:
        """The batch of all rows, with their tokens on the device."""
        return self._batch(list(range(len(self.rows))), token_ids_R)

    def _batch(self, places: list[int], input_ids: list[int] | Tensor) -> StepBatch:
        positions = [self.rows[place].position for place in places]
        return StepBatch(
            input_ids=input_ids,
            positions=np.asarray(positions, dtype=np.int64),
            slot_mapping=self._slots[places],
            q_lens=[1] * len(places),
            seq_lens=[at + 1 for at in positions],
            block_tables=[self._block_tables[place] for place in places],
            logits_rows=list(range(len(places))),
        )
