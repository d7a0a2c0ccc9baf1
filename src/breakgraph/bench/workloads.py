"""The steps and prompts that are timed: random tokens, the same ones for the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from breakgraph.runners import StepBatch
from breakgraph.runners.spec import last_rows

BLOCK_SIZE = 16
_LONG_TOKENS = 8192


def num_blocks(lens: Sequence[int]) -> int:
    """KV blocks that requests of these lengths take, the reserved one included."""
    return 1 + sum(-(-length // BLOCK_SIZE) for length in lens)


def even_lens(num_tokens: int, num_reqs: int) -> list[int]:
    """Lengths that differ by one at most."""
    return [num_tokens // num_reqs + (index < num_tokens % num_reqs) for index in range(num_reqs)]


def prefill_batch(num_tokens: int, num_reqs: int, vocab_size: int, seed: int) -> StepBatch:
    """`num_tokens` new tokens in `num_reqs` prompts of the same length, none of them cached."""
    q_lens = even_lens(num_tokens, num_reqs)
    return _batch(q_lens, q_lens, vocab_size, seed)


def prefill_rounds(num_tokens: int, rounds: int) -> int:
    """How often a step is timed. A quarter is enough for a long one: it takes long, and launches hardly count."""
    return rounds if num_tokens < _LONG_TOKENS else max(1, rounds // 4)


def decode_batch(num_reqs: int, context: int, vocab_size: int, seed: int) -> StepBatch:
    """One new token in each request, after `context` cached ones."""
    return _batch([1] * num_reqs, [context + 1] * num_reqs, vocab_size, seed)


def _batch(q_lens: Sequence[int], seq_lens: Sequence[int], vocab_size: int, seed: int) -> StepBatch:
    """Requests in blocks of their own, one after the other from block 1 on; arrays, as the engine's steps are."""
    tables, positions, slots, first = [], [], [], 1
    for q_len, seq_len in zip(q_lens, seq_lens, strict=True):
        table = np.arange(first, first + -(-seq_len // BLOCK_SIZE))
        first += len(table)
        tables.append(table)
        positions.append(np.arange(seq_len - q_len, seq_len))
        slots.append(table[positions[-1] // BLOCK_SIZE] * BLOCK_SIZE + positions[-1] % BLOCK_SIZE)
    generator = torch.Generator().manual_seed(seed)
    return StepBatch(
        input_ids=torch.randint(vocab_size, (sum(q_lens),), generator=generator).numpy(),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        q_lens=list(q_lens),
        seq_lens=list(seq_lens),
        block_tables=tables,
        logits_rows=last_rows(q_lens),
    )


def random_prompts(num_requests: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(vocab_size, (num_requests, length), generator=generator).tolist()
    return prompts
