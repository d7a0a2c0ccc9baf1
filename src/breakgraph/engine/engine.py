"""The step loop: schedule, run, sample, commit. Nothing of a step is booked before all of it has succeeded."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from breakgraph.attention import KVCacheBuffers
from breakgraph.engine.ahead import StepAhead
from breakgraph.engine.config import EngineConfig
from breakgraph.engine.detokenizer import Detokenizer
from breakgraph.engine.device_memory import MemoryPlan
from breakgraph.engine.guide import Grammar, known_masks
from breakgraph.engine.guided import GrammarCompiler
from breakgraph.engine.kv_cache import num_blocks_for
from breakgraph.engine.memory_report import MemoryReport, memory_report
from breakgraph.engine.request import Request
from breakgraph.engine.sampler import DrawnTokens, History, Sampler, TokenLogprobs, token_logprobs
from breakgraph.engine.sampling import SamplingParams
from breakgraph.engine.scheduler import ScheduledStep, Scheduler
from breakgraph.engine.stats import engine_stats
from breakgraph.engine.step_batch import PreparedDecode, build_batch
from breakgraph.errors import (
    ClosedError,
    ConfigError,
    EmptyPromptError,
    PromptError,
    PromptTooLongError,
    VerificationError,
)
from breakgraph.graph import PlanFamily
from breakgraph.runners import Runner
from breakgraph.verify import NUM_BYSTANDERS, Limits, LiveCheck, VerifySummary, verify_runners

if TYPE_CHECKING:
    from torch import Tensor

    from breakgraph.graph import PlanReport, ShapeKey

logger = logging.getLogger(__name__)

CaptureProgress = Callable[[str, int, int], None]
"""Called after each capture: key, captures done, captures in all of that runner."""


@dataclass(frozen=True)
class ModelFacts:
    """What the engine has to know of the model it runs."""

    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    weight_bytes: int


class Engine:
    """Serves requests with one model. Not thread-safe.

    Made by `load_engine`. Owns: the runners, the plan family, the KV cache. Closed by: whoever loaded it.

    Attributes:
        memory: What graphs and steps were measured to need, before anything was captured.
        verified: The last verification; None before the first.
        live_check: What compares a share of the served steps with eager; None where the config does not ask for it.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        facts: ModelFacts,
        tokenizer: Any | None,
        family: PlanFamily,
        kv: KVCacheBuffers,
        runners: Mapping[str, Runner],
        scheduler: Scheduler,
        sampler: Sampler,
        memory: MemoryPlan,
        model_tensors: Sequence[Tensor] = (),
    ) -> None:
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.family = family
        self.kv: KVCacheBuffers | None = kv
        self.runners = runners
        self.scheduler = scheduler
        self.ahead = StepAhead(scheduler)
        self.sampler = sampler
        self.grammars = GrammarCompiler(tokenizer, facts.vocab_size, facts.eos_token_ids)
        self.memory = memory
        self.verified: VerifySummary | None = None
        self.live_check: LiveCheck | None = None
        if config.verify_fraction:
            self.live_check = LiveCheck(config.verify_fraction, config.seed, kv, model_tensors)
        self._request_ids = map(str, itertools.count())
        self._prepared: PreparedDecode | None = None
        self._closed = False

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def capture(self, progress: Callable[[Runner], CaptureProgress | None] = lambda runner: None) -> None:
        """Captures every bucket of every runner that is not captured yet. On failure nothing of that runner is kept."""
        self._check_open()
        choosing = [runner for runner in self.runners.values() if runner.backend.chooses]
        with self.family.window():
            for runner in choosing:
                runner.choose()  # on trial captures, for whose pool there is room as long as none is reserved
            if choosing:
                self.family.device.release_cached()
            self.family.reserve(*self.memory.pool_runs, output_bytes=self.memory.output_bytes)
            for runner in self.runners.values():
                runner.capture(progress(runner))
        self.family.device.release_cached()  # warm-ups run beside the pool, and what they took is not needed again
        if self.config.verify == "startup":
            summary = self.verify()
            if not summary.ok:
                raise VerificationError("\n".join(map(str, ["replays differ from eager", *summary.wrong])), summary)
        elif self.live_check is not None:
            self.live_check.look_for_state(self.runners.values())

    def verify(self) -> VerifySummary:
        """Compares every captured bucket with eager on random steps, in poisoned memory and on blocks of nobody.

        Cached prefixes are given up where their blocks are needed.

        Raises:
            ConfigError: there are requests.
        """
        self._check_open()
        if self.has_requests:
            raise ConfigError("there are requests: verify before the first one or after the last")
        assert self.kv is not None, "an open engine has a KV cache"
        sizes, allocator = self.config.sizes, self.scheduler.allocator
        wanted = sizes.max_num_seqs * num_blocks_for(sizes.max_model_len, self.config.block_size) + NUM_BYSTANDERS
        blocks = allocator.allocate(min(wanted, allocator.num_free))
        try:
            limits = Limits(blocks=blocks, vocab_size=self.facts.vocab_size, max_model_len=sizes.max_model_len)
            self.verified = verify_runners(self.runners.values(), self.kv, limits, seed=self.config.seed)
        finally:
            allocator.free(blocks)
        logger.info("%s", self.verified.line())
        return self.verified

    def make_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        index: int = 0,
        with_text: bool = True,
        grammar: Grammar | None = None,
    ) -> Request:
        """Checks a request and makes it ready for `add`. Changes nothing, so any thread may call it at any time.

        Args:
            prompt_token_ids: the prompt.
            params: how to answer. Each of the n answers is a request of its own.
            prompt: the text that the prompt was made from, if any.
            index: which of the n answers; a seed is raised by it, and only the first has `prompt_logprobs`.
            with_text: whether the request makes text of its tokens; without, it has token ids only.
            grammar: of the form that the params ask for; without, it is compiled here.

        Raises EmptyPromptError, PromptTooLongError, RequestTooLargeError, PromptError (a token id that the model does
        not have), or ConfigError (stop strings without a tokenizer, a form that cannot be guided to).
        """
        self._check_open()
        self._check_prompt(prompt_token_ids)
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError(f"stop={list(params.stop_strings)} needs a tokenizer, {self.config.model} has none here; "
                              "use stop_token_ids")  # fmt: skip
        if index > 0 and params.prompt_logprobs is not None:
            params = dataclasses.replace(params, prompt_logprobs=None)
        max_model_len = self.config.sizes.max_model_len
        tokenizer = self.tokenizer if with_text else None
        if grammar is None and params.guided_decoding is not None:
            grammar = self.grammars.compile(params.guided_decoding)
        request = Request(
            request_id=next(self._request_ids),
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            max_total_tokens=min(len(prompt_token_ids) + params.max_tokens, max_model_len),
            eos_token_ids=self.facts.eos_token_ids,
            index=index,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, prompt_token_ids),
            generator=None if params.seed is None else self.sampler.make_generator(_wrap_int64(params.seed + index)),
            guide=None if grammar is None else grammar.guide(),
        )
        self.scheduler.check_fits(request)
        return request

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._check_open()
        self.scheduler.add(request)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Request]:
        """Runs one step and returns the requests that it finished.

        Where nothing of the next step but its tokens depends on this one, the device has it before this one's tokens
        are waited for; the next call goes on from there.

        Whatever is raised on the way, no token and no KV of this step is booked: the same step can be tried again, or
        its requests aborted. Random numbers that were drawn for it are not put back.

        Args:
            meanwhile: called when the device has the step, and the next one if that is launched ahead, before this
                one's tokens are waited for; not when there is none.
        """
        self._check_open()
        try:
            return self._step(meanwhile)
        except BaseException:
            self.ahead.drop()  # it has the tokens of a step that is not booked
            raise

    def _step(self, meanwhile: Callable[[], None]) -> list[Request]:
        taken = self.ahead.take()
        if taken is None:
            step = self.scheduler.schedule()
            if step is None:
                return []
            logits = self._launch(step)
        else:
            step, logits = taken
        token_ids: Sequence[int | None]
        next_step = self.ahead.next_step(step, is_checked=self.live_check is not None)
        if next_step is None or next_step.lacks_blocks:
            meanwhile()
            self._prepared = next_step or self.ahead.prepare(step)
            token_ids = self._sample(step, logits)
            logprobs = self._logprobs(step, logits, token_ids)
        else:
            # Drawn before the next step is launched, which overwrites the logits; copies of them go.
            drawn = self._draw(step, logits, list(range(len(step.rows))), {})
            del taken, logits
            self.ahead.launch(next_step, step, drawn.token_ids_R, self.runners["decode"].run)
            meanwhile()
            token_ids, logprobs = drawn.wait(), {}
        finished = self.scheduler.commit(step, token_ids, logprobs)
        self.ahead.drop_if_void()
        return finished

    def _launch(self, step: ScheduledStep) -> Any:
        runner = self.runners["decode" if step.is_decode else "prefill"]
        prepared, self._prepared = self._prepared, None
        batch = None if prepared is None else prepared.batch(step)
        if batch is None:
            batch = build_batch(step, self.config.block_size)
        return runner.run(batch) if self.live_check is None else self.live_check.run(runner, batch)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops requests and gives up their blocks; unknown ids are ignored."""
        self.scheduler.abort(request_ids)
        self.ahead.drop_if_void()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, as after a change of the weights.

        Allowed at any time. Requests that run keep their KV, old as it is, and share none of it with later ones.
        """
        self._check_open()
        self.scheduler.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """JSON-able counts, units in the names."""
        self._check_open()
        return engine_stats(self)

    def memory_report(self) -> MemoryReport:
        """What each captured bucket needs, and what the engine holds."""
        self._check_open()
        return memory_report(self)

    def explain(self) -> dict[ShapeKey, PlanReport]:
        """What was captured, by key, largest bucket of each runner first."""
        self._check_open()
        return {key: report for runner in self.runners.values() for key, report in runner.explain().items()}

    def close(self) -> None:
        """Closes runners (with their backends and plans), then the pool, then lets go of weights and KV cache."""
        if self._closed:
            return
        self._closed = True
        self.live_check = None
        runners, self.runners = self.runners, {}
        self.ahead.drop()
        with ExitStack() as stack:
            stack.callback(setattr, self, "kv", None)
            stack.callback(self.family.close)
            for runner in runners.values():
                stack.callback(runner.close)
            stack.callback(self.family.device.synchronize)  # a step that was launched ahead may still run

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        max_model_len = self.config.sizes.max_model_len
        if not token_ids:
            raise EmptyPromptError("a prompt needs one token at least, got none")
        if len(token_ids) >= max_model_len:
            can_raise = max_model_len < self.facts.max_position
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, max_model_len={max_model_len} leaves room for "
                f"{max_model_len - 1} and one new one; shorten it"
                + (f", or raise max_model_len (the model allows {self.facts.max_position})" if can_raise else "")
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.facts.vocab_size:
            raise PromptError(
                f"token id {low if low < 0 else high} is not in the vocabulary of {self.facts.vocab_size} tokens"
            )

    def _sample(self, step: ScheduledStep, logits_RV: Any) -> list[int | None]:
        """One entry a row: None for chunks that don't reach the end of their prompt, and for those whose guides do not
        know yet what may follow."""
        wanted = [i for i, row in enumerate(step.rows) if row.needs_sample]
        # Found while the device still runs the step.
        guides = {i: guide for i in wanted if (guide := step.rows[i].request.guide) is not None}
        masks = known_masks(guides, others_go_on=len(guides) < len(step.rows))
        wanted = [i for i in wanted if i not in guides or i in masks]
        token_ids: list[int | None] = [None] * len(step.rows)
        if not wanted:
            return token_ids
        for i, token_id in zip(wanted, self._draw(step, logits_RV, wanted, masks).wait(), strict=True):
            token_ids[i] = token_id
        return token_ids

    def _draw(
        self, step: ScheduledStep, logits_RV: Tensor, wanted: Sequence[int], masks: Mapping[int, Tensor]
    ) -> DrawnTokens:
        """Of the rows `wanted`; `masks` by row."""
        requests = [step.rows[i].request for i in wanted]
        if len(wanted) < len(step.rows):
            logits_RV = logits_RV[wanted]
        params, generators = [r.params for r in requests], [r.generator for r in requests]
        histories: list[History] = []
        if any(p.has_penalties for p in params):
            histories = [History(r.prompt_token_ids, r.output_token_ids) for r in requests]
        by_place = {place: masks[i] for place, i in enumerate(wanted) if i in masks}
        return self.sampler.draw(logits_RV, params, generators, histories, by_place)

    def _logprobs(
        self, step: ScheduledStep, logits_RV: Any, token_ids: Sequence[int | None]
    ) -> dict[int, TokenLogprobs]:
        """By row, for those that ask for them: of the token that was drawn, or of the next one of the prompt."""
        rows, chosen, num_top = [], [], []
        for i, (row, token_id) in enumerate(zip(step.rows, token_ids, strict=True)):
            request, count = row.request, row.request.params.logprobs
            if request.wants_prompt_logprobs and row.num_new_tokens == request.max_next_tokens:
                count = request.params.prompt_logprobs
                token_id = request.prompt_token_ids[len(request.prompt_logprobs) + 1]
            if token_id is not None and count is not None:
                rows.append(i)
                chosen.append(token_id)
                num_top.append(count)
        return dict(zip(rows, token_logprobs(logits_RV[rows], chosen, num_top), strict=True)) if rows else {}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine was closed; make a new LLM")


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
