"""Prefill: any mix of requests in a bucket of tokens. A decoding request is one with a single new token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from breakgraph.attention import AttentionStep
from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.runners.base import Runner
from breakgraph.runners.batch import StepBatch
from breakgraph.runners.buffers import stage_ints, stage_rows
from breakgraph.runners.ladder import check_ladder, default_ladder
from breakgraph.runners.spec import RESERVED_SLOT, FieldSpec, Pad, PhaseSpec


def prefill_spec(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    buckets: Sequence[int] | None = None,
) -> PhaseSpec:
    """Token buckets through ``max_num_batched_tokens``, or the explicit ``buckets``.

    Raises:
        ConfigError: ``buckets`` is not an ascending list of positive integers.
    """
    top = max_num_batched_tokens
    return PhaseSpec(
        phase="prefill",
        size_axis="tokens",
        ladder=default_ladder(top) if buckets is None else check_ladder(buckets, "prefill_buckets"),
        max_size=top,
        max_num_seqs=max_num_seqs,
        fields=(
            FieldSpec(name="input_ids", dtype=torch.int64, axis="tokens", pad=0),
            FieldSpec(name="positions", dtype=torch.int64, axis="tokens", pad=0),
            FieldSpec(name="slot_mapping", dtype=torch.int64, axis="tokens", pad=RESERVED_SLOT),
            FieldSpec(name="logits_rows", dtype=torch.int64, axis="requests", pad=Pad.REPEAT_LAST),
        ),
        tokens_per_req=None,
        attention_support=frozenset({"varlen"}),
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks_per_seq=-(-max_model_len // block_size),
    )


class PrefillRunner(Runner):
    """Attention metadata is new on every step and covers the live requests only: attention is in the breaks."""

    def _attention_step(self, batch: StepBatch, fields: Mapping[str, Tensor]) -> AttentionStep:
        slot_mapping = fields["slot_mapping"]
        starts = [0]
        for q_len in batch.q_lens:
            starts.append(starts[-1] + q_len)
        table_field = FieldSpec(
            name="block_tables",
            dtype=torch.int32,
            axis="requests",
            pad=RESERVED_BLOCK,
            tail=(max(map(len, batch.block_tables)),),
            limit=self.spec.num_blocks,
        )
        tables = stage_rows(table_field, batch.block_tables, batch.num_reqs, self.device)
        return AttentionStep(
            phase=self.spec.phase,
            num_tokens=batch.num_tokens,
            padded_num_tokens=slot_mapping.shape[0],
            q_lens=tuple(batch.q_lens),
            seq_lens=tuple(batch.seq_lens),
            cu_seqlens_q_gpu=stage_ints(starts, torch.int32, self.device),
            seq_lens_gpu=stage_ints(batch.seq_lens, torch.int32, self.device),
            block_tables_gpu=tables.to(self.device, non_blocking=True),
            slot_mapping_gpu=slot_mapping,
        )
