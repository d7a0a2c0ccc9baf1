"""Prefill: any mix of requests in a bucket of tokens. A decoding request is one with a single new token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from breakgraph.attention import AttentionStep, RequestTensors
from breakgraph.attention.kv_buffers import RESERVED_BLOCK
from breakgraph.errors import ConfigError
from breakgraph.runners.base import Runner
from breakgraph.runners.batch import StepBatch
from breakgraph.runners.buffers import stage_fields
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
    request_slots: int | None = None,
) -> PhaseSpec:
    """Token buckets through ``max_num_batched_tokens``, or the explicit ``buckets``.

    Args:
        request_slots: For a :class:`SlottedPrefillRunner`: rows of request metadata in every bucket.

    Raises:
        ConfigError: ``buckets`` is not an ascending list of positive integers, or ``request_slots`` not positive.
    """
    if request_slots is not None and request_slots < 1:
        raise ConfigError(f"request_slots: expected 1 or more, got {request_slots}")
    top = max_num_batched_tokens
    max_blocks_per_seq = -(-max_model_len // block_size)
    fields = (
        FieldSpec(name="input_ids", dtype=torch.int64, axis="tokens", pad=0),
        FieldSpec(name="positions", dtype=torch.int64, axis="tokens", pad=0),
        FieldSpec(name="slot_mapping", dtype=torch.int64, axis="tokens", pad=RESERVED_SLOT),
        FieldSpec(name="logits_rows", dtype=torch.int64, axis="requests", pad=Pad.REPEAT_LAST),
        FieldSpec(name="num_live_tokens", dtype=torch.int32, axis="step", pad=0),
    )
    return PhaseSpec(
        phase="prefill",
        size_axis="tokens",
        ladder=default_ladder(top) if buckets is None else check_ladder(buckets, "prefill_buckets"),
        max_size=top,
        max_num_seqs=max_num_seqs,
        fields=fields if request_slots is None else fields + _slot_fields(max_blocks_per_seq),
        break_fields=_slot_fields(max_blocks_per_seq),
        tokens_per_req=None,
        attention_support=frozenset() if request_slots is None else frozenset({"varlen"}),
        num_blocks=num_blocks,
        block_size=block_size,
        max_blocks_per_seq=max_blocks_per_seq,
        request_slots=request_slots,
    )


def _slot_fields(max_blocks_per_seq: int) -> tuple[FieldSpec, ...]:
    """Request metadata. An unused slot is a sentinel: no tokens, no keys, and its start parked after the last token."""
    return (_CU_SEQLENS_Q, _SEQ_LENS, _table_field(max_blocks_per_seq))


SLOT_FIELDS = ("cu_seqlens_q", "seq_lens", "block_tables")
"""What attention reads: the last fields of a spec with request slots, and what breaks have besides their bucket."""
_CU_SEQLENS_Q = FieldSpec(name="cu_seqlens_q", dtype=torch.int32, axis="request_bounds", pad=Pad.REPEAT_LAST)
_SEQ_LENS = FieldSpec(name="seq_lens", dtype=torch.int32, axis="requests", pad=0)


def _table_field(width: int) -> FieldSpec:
    return FieldSpec(
        name="block_tables",
        dtype=torch.int32,
        axis="requests",
        pad=RESERVED_BLOCK,
        tail=(width,),
    )


class PrefillRunner(Runner):
    """Attention metadata is new on every step and covers the live requests only: attention is in the breaks."""

    has_live_metadata = True

    def _attention_step(self, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool) -> AttentionStep:
        slot_mapping = fields["slot_mapping"]
        return AttentionStep(
            phase=self.spec.phase,
            num_tokens=batch.num_tokens,
            padded_num_tokens=slot_mapping.shape[0],
            q_lens=tuple(batch.q_lens),
            seq_lens=tuple(batch.seq_lens),
            block_tables=batch.block_tables,
            requests=(
                _requests_in(self._allocated().break_views)
                if in_bucket
                else cache(partial(_staged_requests, batch, self.device))
            ),
            slot_mapping_gpu=slot_mapping,
            num_tokens_gpu=fields["num_live_tokens"] if in_bucket else None,
        )


def _requests_in(fields: Mapping[str, Tensor]) -> Callable[[], RequestTensors]:
    requests = RequestTensors(**{name: fields[name] for name in SLOT_FIELDS})
    return lambda: requests


def _staged_requests(batch: StepBatch, device: torch.device) -> RequestTensors:
    table_field = _table_field(max(map(len, batch.block_tables)))
    parts = ((_CU_SEQLENS_Q, batch.cu_seqlens_q), (_SEQ_LENS, batch.seq_lens), (table_field, batch.block_tables))
    return RequestTensors(**stage_fields(parts, device))


class SlottedPrefillRunner(Runner):
    """Attention metadata lies in request slots of the static buffers, so that a full graph can hold the attention.

    A bucket is so many tokens and so many slots. A step of more requests than slots runs eagerly.
    """

    def _attention_step(self, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool) -> AttentionStep:
        return slotted_step(self.spec, batch, fields, in_bucket)


def slotted_step(
    spec: PhaseSpec, batch: StepBatch, fields: Mapping[str, Tensor], in_bucket: bool
) -> AttentionStep:  # fmt: skip
    """The step of a spec with request slots, see :meth:`Runner._attention_step`."""
    slot_mapping = fields["slot_mapping"]
    return AttentionStep(
        phase=spec.phase,
        num_tokens=batch.num_tokens,
        padded_num_tokens=slot_mapping.shape[0],
        q_lens=tuple(batch.q_lens),
        seq_lens=tuple(batch.seq_lens),
        requests=_requests_in(fields),
        slot_mapping_gpu=slot_mapping,
        num_tokens_gpu=fields["num_live_tokens"] if in_bucket else None,
        fixed_slots=in_bucket,
    )
