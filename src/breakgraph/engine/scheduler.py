"""Which requests run in the next step, and with how many tokens each.

A request is admitted when the tokens it has fit beside those of all running requests. Its answer takes blocks as it
grows. When one is needed and none is left, the request that was admitted last is preempted: it goes back to the head of
the queue without its blocks, and its prompt and answer so far are computed again later, except for what the prefix
cache still has. So the oldest request always goes on. First come, first served: a large request at the head of the
queue waits, and so do those behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from breakgraph.engine.kv_cache import BlockAllocator, num_blocks_for
from breakgraph.engine.prefix_cache import BlockTokens, PrefixNode
from breakgraph.engine.request import Request, RequestStatus
from breakgraph.errors import RequestTooLargeError

if TYPE_CHECKING:
    from breakgraph.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class ScheduledRow:
    """`num_new_tokens` of the request's pending tokens; fewer than all of them is a chunk."""

    request: Request
    num_new_tokens: int

    @property
    def needs_sample(self) -> bool:
        return self.num_new_tokens == self.request.num_pending_tokens


@dataclass(frozen=True)
class ScheduledStep:
    """Running requests with one pending token first, then those with more, then the newly admitted."""

    rows: tuple[ScheduledRow, ...]
    is_decode: bool
    """Every row is one token."""


class Scheduler:
    """Owns the queues and the block allocator's books. No tensors."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In the order of admission."""
        self.num_prompt_tokens = 0
        """Of all requests that have started."""
        self.num_prefix_cached_tokens = 0
        """Those of them that were found in the prefix cache."""
        self.num_preemptions = 0
        self._is_torn = False
        self._finished: list[Request] = []
        """Not returned by a commit yet."""

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Raises RequestTooLargeError for a request that could not run even alone."""
        needed = num_blocks_for(request.max_total_tokens, self.block_size)
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
        """The next step, or None when there is nothing to do. Called again without a commit, it gives the same rows."""
        with self._updating():
            rows = self._running_rows()
            while not self.allocator.can_allocate(sum(missing := [self._num_missing_blocks(row) for row in rows])):
                self._preempt_last()
                rows = self._running_rows()
            for row, num_blocks in zip(rows, missing, strict=True):
                if num_blocks:
                    row.request.block_ids += self.allocator.allocate(num_blocks)
            budget = self.max_num_batched_tokens - sum(row.num_new_tokens for row in rows)
            while budget > 0 and self._admit_next():
                row = ScheduledRow(self.running[-1], min(self.running[-1].max_next_tokens, budget))
                row.request.block_ids += self.allocator.allocate(self._num_missing_blocks(row))
                rows.append(row)
                budget -= row.num_new_tokens
        if not rows:
            return None
        return ScheduledStep(tuple(rows), is_decode=all(row.num_new_tokens == 1 for row in rows))

    def commit(
        self,
        step: ScheduledStep,
        token_ids: Sequence[int | None],
        logprobs: Mapping[int, TokenLogprobs] = MappingProxyType({}),
    ) -> list[Request]:
        """Books a step that succeeded: one token id a row, None where `needs_sample` is False; `logprobs` by row,
        of that token or of the next one of the prompt. A row that needs a sample and has None computes its last token
        again in the next step.

        Returns the requests that are finished by it; their blocks are free again, or idle in the prefix cache. When a
        row raises, those before it are booked; what they finished is returned by the next commit.
        """
        with self._updating():
            try:
                for index, (row, token_id) in enumerate(zip(step.rows, token_ids, strict=True)):
                    self._commit_row(row, token_id, logprobs.get(index))
            finally:
                self._release([request for request in self._finished if not request.is_finished])
        finished, self._finished = self._finished, []
        return finished

    def _commit_row(self, row: ScheduledRow, token_id: int | None, logprobs: TokenLogprobs | None) -> None:
        request = row.request
        if token_id is not None:
            request.append_token(token_id, logprobs)
            if request.finish_reason is not None:
                self._finished.append(request)
        elif row.needs_sample:
            row = ScheduledRow(request, row.num_new_tokens - 1)
        elif logprobs is not None:
            request.prompt_logprobs.append(logprobs)
        self._book_tokens(row)

    def take_ahead(self, step: ScheduledStep) -> None:
        """Gives the requests that go on after `step` the block that its token needs, unless too few are left.

        Before the step is committed. Whoever goes on would take the block first thing in the next step, and whoever
        does end by this token gives it back.
        """
        with self._updating():
            missing = [
                row.request
                for row in step.rows
                if row.needs_sample
                and len(row.request.block_ids) * self.block_size < row.request.num_tokens + 1
                and not row.request.ends_by_next_token
            ]
            if self.allocator.can_allocate(len(missing)):
                for request in missing:
                    request.block_ids += self.allocator.allocate(1)

    def may_admit_after(self, step: ScheduledStep) -> bool:
        """Whether a waiting request may start in the step that follows `step`. Before that is committed.

        Requests that end by a token that nobody knows yet are taken to go on.
        """
        if not self.waiting:
            return False
        return any(row.request.ends_by_next_token for row in step.rows) or self._next_to_admit() is not None

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Drops requests wherever they are and gives up their blocks; ids that are not here are ignored."""
        wanted = set(request_ids)
        with self._updating():
            dropped = [request for request in (*self.waiting, *self.running) if request.request_id in wanted]
            for request in dropped:
                request.finish_reason = "abort"
            self.waiting = deque(request for request in self.waiting if request.request_id not in wanted)
            self._finished = [request for request in self._finished if request.request_id not in wanted]
            self._release(dropped)
        return dropped

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found by a request that is admitted later."""
        with self._updating():
            self.allocator.forget_prefixes()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Around every change of the books. A Ctrl-C can leave them torn; once nobody is here they are made anew."""
        try:
            yield
        except BaseException:
            self._is_torn = True
            raise
        if self._is_torn and not self.has_requests:
            self.allocator.reset()
            self._is_torn = False

    def _running_rows(self) -> list[ScheduledRow]:
        """One token for whoever has one; the rest of the step for the others, oldest first."""
        rows, longer = [], []
        for request in self.running:
            if request.num_pending_tokens == 1:
                rows.append(ScheduledRow(request, 1))
            else:
                longer.append(request)
        budget = self.max_num_batched_tokens - len(rows)
        for request in longer:
            if budget > 0:
                row = ScheduledRow(request, min(request.max_next_tokens, budget))
                rows.append(row)
                budget -= row.num_new_tokens
        return rows

    def _num_missing_blocks(self, row: ScheduledRow) -> int:
        """None when a step that failed is scheduled again."""
        end = row.request.num_computed_tokens + row.num_new_tokens
        return max(0, num_blocks_for(end, self.block_size) - len(row.request.block_ids))

    def _preempt_last(self) -> None:
        assert len(self.running) > 1, f"{self.running} does not fit alone; `add` refuses such requests"
        request = self.running.pop()
        request.status = RequestStatus.WAITING
        request.num_computed_tokens, request.prefix_node = 0, None
        self.waiting.appendleft(request)
        self._give_up_blocks(request)
        self.num_preemptions += 1

    def _admit_next(self) -> bool:
        """Moves the head of the queue to the running requests, if there is room for it."""
        found = self._next_to_admit()
        if found is None:
            return False
        request, cached, node = found
        # Before anything is allocated, so that nothing of it is evicted.
        self.allocator.share(cached)
        request.block_ids, request.prefix_node = cached, node
        request.num_computed_tokens = len(cached) * self.block_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_prefix_cached_tokens += request.num_cached_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.waiting.popleft()
        return True

    def _next_to_admit(self) -> tuple[Request, list[int], PrefixNode | None] | None:
        """The head of the queue with its cached blocks, if blocks for all its tokens are left.

        Those that run have theirs: there is room in a step for one more only when all their tokens are in it. Those
        whose prompts go token by token take theirs as they go.
        """
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        request = self.waiting[0]
        cached, node = self._cached_blocks(request)
        needed = num_blocks_for(request.num_tokens, self.block_size) - len(cached)
        num_idle = sum(self.allocator.num_users(block) == 0 for block in cached)
        return (request, cached, node) if self.allocator.can_allocate(needed + num_idle) else None

    def _cached_blocks(self, request: Request) -> tuple[list[int], PrefixNode | None]:
        """At least one token is left to compute: the logits of the last are needed, or of one in the prompt."""
        if not self.enable_prefix_caching:
            return [], None
        end = len(request.prompt_logprobs) if request.wants_prompt_logprobs else request.num_tokens - 1
        num_blocks = end // self.block_size
        token_blocks = (self._block_tokens(request, index) for index in range(num_blocks))
        return self.allocator.prefix_cache.match(request.adapter_id, token_blocks)

    def _book_tokens(self, row: ScheduledRow) -> None:
        """The row's KV counts from now on, and the blocks that it filled can be found by others."""
        request = row.request
        first = request.num_computed_tokens // self.block_size
        request.num_computed_tokens += row.num_new_tokens
        if request.prefix_node is None:
            return
        for index in range(first, request.num_computed_tokens // self.block_size):
            request.prefix_node = self.allocator.prefix_cache.insert(
                request.prefix_node, self._block_tokens(request, index), request.block_ids[index]
            )

    def _block_tokens(self, request: Request, index: int) -> BlockTokens:
        return tuple(request.token_ids(index * self.block_size, (index + 1) * self.block_size))

    def _release(self, requests: Sequence[Request]) -> None:
        gone = set(requests)
        self.running = [request for request in self.running if request not in gone]
        for request in requests:
            request.status = RequestStatus.FINISHED
            request.prefix_node = None
            self._give_up_blocks(request)

    def _give_up_blocks(self, request: Request) -> None:
        blocks, request.block_ids = request.block_ids, []
        self.allocator.free(blocks)
