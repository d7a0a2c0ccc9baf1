"""Decode: one new token a request, a bucket of requests. All metadata is on the device, so that a graph can hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from breakgraph.attention import AttentionStep, RequestTensors
from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.runners.base import Runner
from breakgraph.runners.batch import StepBatch
from breakgraph.runners.ladder import check_ladder, default_ladder
from breakgraph.runners.spec import RESERVED_SLOT, FieldSpec, Pad, PhaseSpec


def decode_spec(
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    buckets: Sequence[int] | None = None,
) -> PhaseSpec:
    """Request buckets through ``max_num_seqs``, or the explicit ``buckets``.

    Raises:
        ConfigError: ``buckets`` is not an ascending list of positive integers.
    """
    top = max_num_seqs
    max_blocks_per_seq = -(-max_model_len // block_size)
    return PhaseSpec(
        phase="decode",
        size_axis="requests",
        ladder=default_ladder(top) if buckets is None else check_ladder(buckets, "decode_buckets"),
        max_size=top,
        max_num_seqs=max_num_seqs,
        fields=(
            FieldSpec(name="input_ids", dtype=torch.int64, axis="tokens", pad=0),
            FieldSpec(name="positions", dtype=torch.int64, axis="tokens", pad=0),
            FieldSpec(name="slot_mapping", dtype=torch.int64, axis="tokens", pad=RESERVED_SLOT),
            # A padded row attends to the one token that it writes to the reserved slot itself.
            FieldSpec(name="seq_lens", dtype=torch.int32, axis="requests", pad=1),
            FieldSpec(
                name="block_tables",
                dtype=torch.int32,
                axis="requests",
                pad=RESERVED_BLOCK,
                tail=(max_blocks_per_seq,),
            ),
            FieldSpec(name="logits_rows", dtype=torch.int64, axis="requests", pad=Pad.REPEAT_LAST),
            FieldSpec(name="num_live_tokens", dtype=torch.int32, axis="step", pad=0),
        ),
        tokens_per_req=1,
        attention_support=frozenset({"decode", "varlen"}),
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks_per_seq=max_blocks_per_seq,
    )


class DecodeRunner(Runner):
    """Attention metadata is the static buffers. The host lengths are for attention that runs in a break."""

    def _attention_step(self, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool) -> AttentionStep:
        slot_mapping = fields["slot_mapping"]
        requests = RequestTensors(seq_lens=fields["seq_lens"], block_tables=fields["block_tables"])
        return AttentionStep(
            phase=self.spec.phase,
            num_tokens=batch.num_tokens,
            padded_num_tokens=slot_mapping.shape[0],
            q_lens=(1,) * batch.num_reqs,
            seq_lens=tuple(batch.seq_lens),
            requests=lambda: requests,
            slot_mapping_gpu=slot_mapping,
            num_tokens_gpu=fields["num_live_tokens"] if in_bucket else None,
            fixed_slots=in_bucket,
        )
