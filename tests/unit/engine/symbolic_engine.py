"""An engine whose model is a function of the tokens that it finds in the KV, so that a wrong block or a wrong token is
an error, and answers are known beforehand. There is no device: what is launched has run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from breakgraph.engine.engine import Engine, ModelFacts
from breakgraph.engine.request import Request
from breakgraph.engine.sampler import History, Sampler
from breakgraph.engine.sampling import SamplingParams
from breakgraph.engine.scheduler import Scheduler
from breakgraph.runners import StepBatch
from unit.engine.symbolic_kv import BLOCK_SIZE, make_scheduler

VOCAB = 16
EOS = 0
"""What a greedy answer has at every sixteenth place or so."""


class InjectedError(Exception):
    pass


def logits_after(tokens: Sequence[int]) -> list[float]:
    numbers = random.Random(hash(tuple(tokens)))
    return [4 * numbers.random() for _ in range(VOCAB)]


class SymbolicRunner:
    """Each slot holds all tokens up to its own. Every run writes over the logits of the one before."""

    def __init__(self, scheduler: Scheduler, slots: dict[int, tuple[int, ...]], logits_RV: Tensor) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._logits_RV = logits_RV
        self.num_runs = 0
        self.num_rows = 0
        self.fails_at: int | None = None
        """The run that raises, counted from now on; half of its tokens are in the KV then."""

    def run(self, batch: StepBatch) -> Tensor:
        batch.check()
        ids = [int(token) for token in batch.input_ids]
        if self.fails_at is not None:
            self.fails_at -= 1
        fails, at = self.fails_at == 0, 0
        self._logits_RV.fill_(torch.nan)
        for row, (q_len, table) in enumerate(zip(batch.q_lens, batch.block_tables, strict=True)):
            tokens: tuple[int, ...] = ()
            for token, position, slot in zip(
                ids[at : at + q_len], batch.positions[at : at + q_len], batch.slot_mapping[at : at + q_len], strict=True
            ):
                tokens = self._before(int(position), table)
                self._write(int(slot), (*tokens, token))
                tokens = (*tokens, token)
            at += q_len
            if fails and 2 * row >= batch.num_reqs:
                self.fails_at = None
                raise InjectedError("injected")
            self._logits_RV[row] = torch.tensor(logits_after(tokens))
        self.num_runs += 1
        self.num_rows += batch.num_reqs
        if fails:
            self.fails_at = None
            raise InjectedError("injected")
        return self._logits_RV[: batch.num_reqs]

    def _before(self, position: int, table: Sequence[Any]) -> tuple[int, ...]:
        read = [self._slots.get(int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE) for p in range(position)]
        tokens = () if position == 0 else read[-1]
        assert tokens is not None, f"nothing was written at position {position - 1}"
        assert read == [tokens[: p + 1] for p in range(position)], f"read {read}"
        return tokens

    def _write(self, slot: int, tokens: tuple[int, ...]) -> None:
        allocator, block = self._scheduler.allocator, slot // BLOCK_SIZE
        assert block != 0, "wrote to the reserved block"
        assert allocator.num_users(block) == 1, f"wrote to block {block} of {allocator.num_users(block)} requests"
        assert block not in allocator.prefix_cache, f"wrote to the cached block {block}"
        self._slots[slot] = tokens


class SymbolicEngine(Engine):
    def __init__(self, **sizes: Any) -> None:
        scheduler = make_scheduler(**sizes)
        lengths = SimpleNamespace(max_model_len=1000)
        config = SimpleNamespace(verify_fraction=0, seed=0, block_size=BLOCK_SIZE, model="symbolic", sizes=lengths)
        slots: dict[int, tuple[int, ...]] = {}
        logits_RV = torch.zeros(scheduler.max_num_seqs, VOCAB)
        self.fakes = [SymbolicRunner(scheduler, slots, logits_RV) for _ in range(2)]
        super().__init__(
            config=cast("Any", config),
            facts=ModelFacts(VOCAB, 1000, frozenset({EOS}), 0),
            tokenizer=None,
            family=cast("Any", None),
            kv=cast("Any", None),
            runners=cast("Any", dict(zip(("prefill", "decode"), self.fakes, strict=True))),
            scheduler=scheduler,
            sampler=Sampler(torch.device("cpu"), 0),
            memory=cast("Any", None),
        )

    @property
    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Steps launched ahead, void rows, reasons."""
        stats = self.ahead.stats()
        return stats["num_launched"], stats["num_void_rows"], stats["num_not_launched_by_reason"]


def answer_of(request: Request) -> list[int]:
    """What the request is answered if nobody drops it, one token after the other and alone."""
    params = request.params
    sampler = Sampler(torch.device("cpu"), 0)
    generator = None if params.seed is None else sampler.make_generator(params.seed)
    ends = {*(() if params.ignore_eos else (EOS,)), *(params.stop_token_ids or ())}
    prompt, answer = request.prompt_token_ids, list[int]()
    while len(prompt) + len(answer) < request.max_total_tokens and not ends & set(answer[-1:]):
        logits_RV = torch.tensor([logits_after([*prompt, *answer])])
        answer += sampler.draw(logits_RV, [params], [generator], [History(prompt, answer)]).wait()
    return answer


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


ENOUGH = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
FREE_LENGTH = {"ignore_eos": True}


def add(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.make_request(prompt, params)
    engine.add(request)
    return request


def run_to_end(engine: Engine, max_steps: int = 2000) -> int:
    """The steps that it took."""
    for num_steps in range(max_steps):
        if not engine.has_requests:
            return num_steps
        engine.step()
    raise AssertionError(f"not done after {max_steps} steps")
