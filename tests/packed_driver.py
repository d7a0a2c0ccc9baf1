"""Drives a model step by step as an engine would: packed batches, a paged cache with scattered blocks, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from breakgraph.attention import AttentionBackend, AttentionStep, KVCacheBuffers, RequestTensors, use_step
from breakgraph.models import HFModel

BLOCK_SIZE = 4


@dataclass
class TokenSequence:
    tokens: list[int]
    num_done: int = 0
    blocks: list[int] = field(default_factory=list)


class PackedDriver:
    def __init__(self, model: HFModel, attention: AttentionBackend, max_blocks: int = 12) -> None:
        self.model = model
        self.attention = attention
        self.max_blocks = max_blocks
        num_blocks = 5 * max_blocks
        self.kv = KVCacheBuffers.allocate(model.layers, num_blocks, BLOCK_SIZE, model.dtype, model.device)
        attention.bind(self.kv)
        # Neighbours in a sequence are no neighbours in the cache, and block 0 is nobody's.
        self._free = list(range(1, num_blocks, 2)) + list(range(2, num_blocks, 2))

    @torch.inference_mode()
    def step(
        self, work: Sequence[tuple[TokenSequence, int]], *, padding: int = 0, phase: str = "prefill"
    ) -> list[torch.Tensor]:
        """Runs the next `n` tokens of each sequence in one forward; logits [n, vocab] of each."""
        step, input_ids, positions = self.prepare(work, padding, phase)
        device = self.model.device
        rows = torch.arange(len(input_ids), device=device)
        with use_step(self.attention.plan(step)):
            logits = self.model.forward(
                torch.tensor(input_ids, device=device), torch.tensor(positions, device=device), rows
            ).float()
        assert logits.isfinite().all(), "padding rows must be finite too"
        for sequence, num_new in work:
            sequence.num_done += num_new
        return list(logits[: step.num_tokens].split([n for _, n in work]))

    def prepare(
        self, work: Sequence[tuple[TokenSequence, int]], padding: int, phase: str
    ) -> tuple[AttentionStep, list[int], list[int]]:
        input_ids, positions, slots, tables = [], [], [], []
        for sequence, num_new in work:
            end = sequence.num_done + num_new
            while len(sequence.blocks) * BLOCK_SIZE < end:
                sequence.blocks.append(self._free.pop())
            for position in range(sequence.num_done, end):
                input_ids.append(sequence.tokens[position])
                positions.append(position)
                slots.append(sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            tables.append(sequence.blocks + [0] * (self.max_blocks - len(sequence.blocks)))
        q_lens = tuple(n for _, n in work)
        seq_lens = tuple(s.num_done + n for s, n in work)
        num_tokens = len(input_ids)
        row_padding = padding if phase == "decode" else 0
        device = self.model.device

        def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        requests = RequestTensors(
            cu_seqlens_q=torch.nn.functional.pad(int32(list(q_lens)).cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=int32([*seq_lens, *[1] * row_padding]),
            block_tables=int32([*tables, *[[0] * self.max_blocks] * row_padding]),
        )
        step = AttentionStep(
            phase=phase,
            num_tokens=num_tokens,
            padded_num_tokens=num_tokens + padding,
            q_lens=() if phase == "decode" else q_lens,
            seq_lens=() if phase == "decode" else seq_lens,
            slot_mapping_gpu=torch.tensor(slots + [0] * padding, device=device),
            requests=lambda: requests,
        )
        return step, input_ids + [0] * padding, positions + [0] * padding


class CountingDriver(PackedDriver):
    """Its steps carry the live token count on the device, as a runner's padded steps do."""

    def prepare(
        self, work: Sequence[tuple[TokenSequence, int]], padding: int, phase: str
    ) -> tuple[AttentionStep, list[int], list[int]]:
        step, ids, positions = super().prepare(work, padding, phase)
        count = torch.tensor([step.num_tokens], dtype=torch.int32, device=self.model.device)
        named = {name: getattr(step, name) for name in AttentionStep.__dataclass_fields__}
        return AttentionStep(**{**named, "num_tokens_gpu": count}), ids, positions
