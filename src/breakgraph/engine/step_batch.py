"""From scheduled rows to the host lists of a StepBatch."""

from __future__ import annotations

import numpy as np

from breakgraph.engine.scheduler import ScheduledStep
from breakgraph.runners import StepBatch


def build_batch(step: ScheduledStep, block_size: int) -> StepBatch:
    """Rows back to back. Block tables reach no further than each request's tokens after this step."""
    input_ids: list[int] = []
    positions, slots, seq_lens, block_tables = [], [], [], []
    for row in step.rows:
        request = row.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + row.num_new_tokens
        input_ids.extend(request.pending_token_ids(row.num_new_tokens))
        blocks = np.asarray(request.block_ids[: -(-end // block_size)], dtype=np.int64)
        row_positions = np.arange(start, end, dtype=np.int64)
        positions.append(row_positions)
        slots.append(blocks[row_positions // block_size] * block_size + row_positions % block_size)
        seq_lens.append(end)
        block_tables.append(blocks)
    q_lens = [row.num_new_tokens for row in step.rows]
    return StepBatch(
        input_ids=input_ids,
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        q_lens=q_lens,
        seq_lens=seq_lens,
        block_tables=block_tables,
        logits_rows=(np.cumsum(q_lens) - 1).tolist(),
    )
