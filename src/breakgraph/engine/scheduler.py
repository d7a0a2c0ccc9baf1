"""Which requests run in the next step, and with how many tokens each.

A request gets all the KV blocks that it can ever need (prompt and max_tokens) when it is admitted, so nothing that
runs is ever put back. First come, first served: a large request at the head of the queue waits, and so do those
behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from breakgraph.engine.kv_cache import BlockAllocator, num_blocks_for
from breakgraph.engine.request import Request, RequestStatus
from breakgraph.errors import RequestTooLargeError


@dataclass(frozen=True)
class ScheduledRow:
    """`num_new_tokens` of the request's pending tokens; fewer than all of them is a chunk of its prompt."""

    request: Request
    num_new_tokens: int

    @property
    def needs_sample(self) -> bool:
        return self.num_new_tokens == self.request.num_pending_tokens


@dataclass(frozen=True)
class ScheduledStep:
    """Decode rows first, then chunks of prompts."""

    rows: tuple[ScheduledRow, ...]
    is_decode: bool
    """Every row is one token of an answer."""


class Scheduler:
    """Owns the queues and the block allocator's books. No tensors."""

    def __init__(
        self, allocator: BlockAllocator, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Raises RequestTooLargeError for a request that could not run even alone."""
        needed = self._num_blocks(request)
        if needed > self.allocator.num_usable:
            raise RequestTooLargeError(
                f"request {request.request_id} needs {needed} KV blocks of {self.block_size} tokens (prompt "
                f"{request.num_prompt_tokens} tokens, up to {request.max_total_tokens - request.num_prompt_tokens} new "
                f"ones), the cache has {self.allocator.num_usable}; lower max_tokens, or raise gpu_memory_utilization "
                "or num_gpu_blocks_override"
            )

    def add(self, request: Request) -> None:
        self.check_fits(request)
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when there is nothing to do. Admits waiting requests as far as they fit."""
        rows = [ScheduledRow(request, 1) for request in self.running if not request.is_prefilling]
        num_decode_rows = len(rows)
        budget = self.max_num_batched_tokens - num_decode_rows
        for request in self._prefilling():
            if budget <= 0:
                break
            row = ScheduledRow(request, min(request.num_pending_tokens, budget))
            rows.append(row)
            budget -= row.num_new_tokens
        if not rows:
            return None
        return ScheduledStep(tuple(rows), is_decode=len(rows) == num_decode_rows)

    def commit(self, step: ScheduledStep, token_ids: Sequence[int | None]) -> list[Request]:
        """Books a step that succeeded: one token id a row, None where `needs_sample` is False.

        Returns the requests that are finished by it; their blocks are free again.
        """
        finished = []
        for row, token_id in zip(step.rows, token_ids, strict=True):
            request = row.request
            needs_sample = row.needs_sample
            request.num_computed_tokens += row.num_new_tokens
            if not needs_sample:
                continue
            assert token_id is not None, f"request {request.request_id} got no token"
            request.append_token(token_id)
            if request.finish_reason is not None:
                finished.append(request)
        self._release(finished)
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Drops requests wherever they are and frees their blocks; ids that are not here are ignored."""
        wanted = set(request_ids)
        dropped = [request for request in (*self.waiting, *self.running) if request.request_id in wanted]
        for request in dropped:
            request.finish_reason = "abort"
        self.waiting = deque(request for request in self.waiting if request.request_id not in wanted)
        self._release(dropped)
        if not self.has_requests:
            # Also right when a Ctrl-C came between taking blocks and noting them.
            self.allocator.reset()
        return dropped

    def _prefilling(self) -> Iterable[Request]:
        """Requests with a prompt to compute, oldest first; admits the next one when asked for more."""
        yield from [request for request in self.running if request.is_prefilling]
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self.allocator.can_allocate(self._num_blocks(request)):
                return
            request.block_ids = self.allocator.allocate(self._num_blocks(request))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.waiting.popleft()
            yield request

    def _release(self, requests: Sequence[Request]) -> None:
        gone = set(requests)
        self.running = [request for request in self.running if request not in gone]
        for request in requests:
            request.status = RequestStatus.FINISHED
            blocks, request.block_ids = request.block_ids, []
            self.allocator.free(blocks)

    def _num_blocks(self, request: Request) -> int:
        return num_blocks_for(request.max_total_tokens, self.block_size)
