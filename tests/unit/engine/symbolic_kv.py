"""A model whose KV says what it was computed from, so that a wrong block is a wrong word and not a wrong number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from breakgraph.engine.kv_cache import BlockAllocator
from breakgraph.engine.request import Request
from breakgraph.engine.sampling import SamplingParams
from breakgraph.engine.scheduler import ScheduledStep, Scheduler
from breakgraph.engine.step_batch import build_batch

BLOCK_SIZE = 4
SIZES = st.builds(
    lambda max_num_seqs, extra_tokens, **others: {
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + extra_tokens, **others
    },
    num_blocks=st.integers(9, 20), max_num_seqs=st.integers(1, 5), extra_tokens=st.integers(0, 12),
    enable_prefix_caching=st.booleans(),
)  # fmt: skip
"""Of schedulers in which requests give way to others, as options of `make_scheduler`."""


def make_scheduler(
    num_blocks: int = 64, max_num_seqs: int = 4, max_num_batched_tokens: int = 16, *, enable_prefix_caching: bool = True
) -> Scheduler:
    return Scheduler(
        BlockAllocator(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )


def make_request(
    name: str, prompt: int | Iterable[int], max_tokens: int = 3, adapter_id: str | None = None, **params: Any
) -> Request:
    """A prompt given by its length has tokens of its own: no other name's begins like it."""
    if isinstance(prompt, int):
        first = 1000 * (1 + sum(256**i * byte for i, byte in enumerate(name.encode())))
        prompt = range(first, first + prompt)
    prompt_token_ids = list(prompt)
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=prompt_token_ids,
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_total_tokens=len(prompt_token_ids) + max_tokens,
        adapter_id=adapter_id,
        eos_token_ids=frozenset({99}),
    )


def answer_of(request: Request) -> list[int]:
    """What the symbolic model says to a prompt."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.params.max_tokens):
        tokens.append(next_token(request.adapter_id, tokens))
    return tokens[request.num_prompt_tokens :]


def next_token(adapter_id: str | None, tokens: Iterable[int]) -> int:
    """Of few, so that answers often go on alike; never the end token."""
    return hash(tuple(tokens)) % 2 + (1 if adapter_id is None else 3)


class SymbolicKV:
    """Each slot holds (adapter, all tokens up to its own)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def run(self, step: ScheduledStep) -> list[int | None]:
        """Computes a step and returns its sampled tokens, or raises AssertionError for a block that is not right."""
        batch = build_batch(step, BLOCK_SIZE)
        batch.check()
        users = Counter(block for request in self.scheduler.running for block in request.block_ids)
        slots, token_ids = iter(batch.slot_mapping), []
        for row, table in zip(step.rows, batch.block_tables, strict=True):
            assert row.request in self.scheduler.running
            start = row.request.num_computed_tokens
            end = start + row.num_new_tokens
            for position in range(start, end):
                self._write(row.request, position, int(next(slots)), users)
            self._check_reads(row.request, [int(block) for block in table], end)
            token_ids.append(
                next_token(row.request.adapter_id, row.request.token_ids(0, end)) if row.needs_sample else None
            )
        return token_ids

    def _write(self, request: Request, position: int, slot: int, users: Counter[int]) -> None:
        block = slot // BLOCK_SIZE
        assert block != 0, "wrote to the reserved block"
        assert users[block] == 1, f"wrote to block {block}, which {users[block]} requests use"
        assert block not in self.scheduler.allocator.prefix_cache, f"wrote to the cached block {block}"
        self.slots[slot] = (request.adapter_id, tuple(request.token_ids(0, position + 1)))

    def _check_reads(self, request: Request, table: list[int], end: int) -> None:
        for position in range(end):
            found = self.slots.get(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            expected = (request.adapter_id, tuple(request.token_ids(0, position + 1)))
            assert found == expected, f"request {request.request_id}, position {position}: read {found}"


def check_books(scheduler: Scheduler) -> None:
    """Every block is free, idle, or used by those who say so."""
    allocator = scheduler.allocator
    used = Counter(block for request in scheduler.running for block in request.block_ids)
    assert all(len(set(request.block_ids)) == len(request.block_ids) for request in scheduler.running)
    assert 0 not in used
    assert not any(request.block_ids or request.num_computed_tokens for request in scheduler.waiting)
    assert [allocator.num_users(block) for block in range(allocator.num_blocks)] == [
        used[block] for block in range(allocator.num_blocks)
    ]
    assert len(used) + allocator.num_free == allocator.num_usable
