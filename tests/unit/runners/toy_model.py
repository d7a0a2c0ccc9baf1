"""A two-layer decoder that calls the real attention, and the same decoder without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from breakgraph.attention import KVCacheBuffers, LayerAttention, attend
from breakgraph.runners import StepBatch
from breakgraph.runners.spec import last_rows
from unit.runners.fakes import BLOCK_SIZE

NUM_LAYERS, NUM_HEADS, HEAD_DIM, VOCAB, MAX_LEN = 2, 2, 8, 48, 32
HIDDEN = NUM_HEADS * HEAD_DIM
LAYERS = [LayerAttention(i, NUM_HEADS, NUM_HEADS, HEAD_DIM, HEAD_DIM, HEAD_DIM**-0.5) for i in range(NUM_LAYERS)]


class ToyModel:
    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device)

        self.tokens, self.positions = weights(VOCAB, HIDDEN), weights(MAX_LEN, HIDDEN)
        self.qkv = [weights(HIDDEN, 3 * HIDDEN) for _ in LAYERS]
        self.out = [weights(HIDDEN, HIDDEN) for _ in LAYERS]

    def forward(self, fields: Mapping[str, Tensor]) -> Tensor:
        hidden = self.tokens[fields["input_ids"]] + self.positions[fields["positions"]]
        for layer, (w_qkv, w_out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (hidden @ w_qkv).unflatten(1, (3, NUM_HEADS, HEAD_DIM)).unbind(1)
            attended = torch.empty_like(q)
            attend(q, k, v, attended, layer)
            hidden = torch.tanh(hidden + attended.flatten(1) @ w_out)
        return hidden[fields["logits_rows"]] @ self.tokens.T

    def without_cache(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [vocab] after the last of ``token_ids``."""
        device = self.tokens.device
        hidden = self.tokens[torch.tensor(token_ids, device=device)] + self.positions[: len(token_ids)]
        for w_qkv, w_out in zip(self.qkv, self.out, strict=True):
            q, k, v = (hidden @ w_qkv).unflatten(1, (3, NUM_HEADS, HEAD_DIM)).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = torch.tanh(hidden + attended.transpose(0, 1).flatten(1) @ w_out)
        return hidden[-1] @ self.tokens.T


@dataclass
class ToyRequest:
    """Tokens, the blocks they live on, and how many are cached."""

    token_ids: list[int]
    blocks: list[int]
    num_cached: int = field(default=0)


def next_step(work: Sequence[tuple[ToyRequest, int]]) -> StepBatch:
    """A step with that many new tokens of each request, which are cached from then on."""
    input_ids, positions, slots = [], [], []
    for request, new in work:
        span = range(request.num_cached, request.num_cached + new)
        input_ids += request.token_ids[span.start : span.stop]
        positions += span
        slots += [request.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        request.num_cached = span.stop
    return StepBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        q_lens=[new for _, new in work],
        seq_lens=[request.num_cached for request, _ in work],
        block_tables=[request.blocks for request, _ in work],
        logits_rows=last_rows([new for _, new in work]),
    )


def new_cache(device: torch.device, num_blocks: int) -> KVCacheBuffers:
    return KVCacheBuffers.allocate(LAYERS, num_blocks, BLOCK_SIZE, torch.float32, device)
