"""What is left after a step that failed, an abort, or a Ctrl-C: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph import LLM, SamplingParams
from breakgraph.attention import AttentionBackend
from breakgraph.engine import llm as llm_module
from breakgraph.engine.engine import Engine
from breakgraph.engine.request import Request
from breakgraph.engine.sampler import Sampler
from breakgraph.engine.scheduler import ScheduledRow, ScheduledStep
from breakgraph.errors import BreakgraphError, ClosedError
from breakgraph.graph import PlanFamily
from unit.engine.small import SMALL, Reference

PROMPTS = [[1, 2, 3], [4] * 30, [5, 6]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class InjectedError(Exception):
    pass


def raise_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: type[BaseException]) -> None:
    """From now on the `call`-th call of `owner.name` (counted from 1) raises before it does anything."""
    original, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise error("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def attention_classes(llm: LLM) -> list[type[AttentionBackend]]:
    attention = llm.engine.runners["prefill"].attention
    return [type(b) for b in (attention, getattr(attention, "default", None)) if b is not None]


WHERE: dict[str, Callable[[LLM], tuple[Any, str, int]]] = {
    # The prompts take three prefill steps of two layers, then decode.
    "in a break of a prefill replay": lambda llm: (attention_classes(llm)[-1], "forward", 4),
    "before the first step": lambda llm: (llm.engine.runners["prefill"], "run", 1),
    "in the plan of a prefill": lambda llm: (attention_classes(llm)[0], "plan", 2),
    "in the plan of a decode": lambda llm: (attention_classes(llm)[0], "plan", 6),
    "after a decode replay": lambda llm: (Sampler, "draw", 5),
    "after a prefill replay": lambda llm: (Sampler, "draw", 1),
}


@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_generate_raises_leaves_nothing_and_works_again(
    idle: LLM, reference: Reference, where: str, error: type[BaseException]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_at(patch, *WHERE[where](idle), error)
        with pytest.raises(error, match="injected"):
            idle.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert not idle.engine.has_requests
    outputs = idle.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [reference(prompt, 8) for prompt in PROMPTS]


def add(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Request]:
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add(request)
    return requests


def run_to_end(engine: Engine, before_step: Callable[[], object] = lambda: None) -> None:
    while engine.has_requests:
        before_step()
        engine.step()


def progress_of(requests: list[Request]) -> list[tuple[int, int]]:
    return [(request.num_computed_tokens, len(request.output_token_ids)) for request in requests]


@pytest.mark.parametrize("where", WHERE)
def test_a_failed_step_books_nothing_and_can_be_tried_again(idle: LLM, reference: Reference, where: str) -> None:
    engine = idle.engine
    requests = add(engine, PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        raise_at(patch, *WHERE[where](idle), InjectedError)
        history: list[list[tuple[int, int]]] = []
        with pytest.raises(InjectedError):
            run_to_end(engine, before_step=lambda: history.append(progress_of(requests)))
        assert progress_of(requests) == history[-1]
    run_to_end(engine)
    assert [request.output_token_ids for request in requests] == [reference(prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_leaves_the_others_as_they_were(idle: LLM, reference: Reference, num_steps: int) -> None:
    engine = idle.engine
    stays, goes, also_stays = add(engine, PROMPTS)
    for _ in range(num_steps):
        engine.step()
    engine.abort([goes.request_id, "nobody"])
    assert (goes.finish_reason, goes.block_ids) == ("abort", [])
    run_to_end(engine)
    assert [r.output_token_ids for r in (stays, also_stays)] == [reference(p, 8) for p in (PROMPTS[0], PROMPTS[2])]


def test_an_aborted_request_still_says_what_it_had(idle: LLM) -> None:
    (request,) = add(idle.engine, [[1, 2, 3]])
    for _ in range(3):
        idle.engine.step()
    idle.engine.abort([request.request_id])
    completion = request.output().outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (3, "abort")


def test_blocks_of_a_finished_request_serve_the_next_with_no_trace_of_it(idle: LLM, reference: Reference) -> None:
    first = [[9] * 60] * 8
    idle.generate(first, GREEDY, use_tqdm=False)
    assert idle.generate([[9] * 5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == reference([9] * 5, 8)


def test_a_row_is_sampled_from_its_own_logits_whichever_rows_are(idle: LLM) -> None:
    unfinished, finished, decoding = (idle.engine.make_request(prompt, GREEDY) for prompt in PROMPTS)
    rows = (ScheduledRow(unfinished, 2), ScheduledRow(finished, 30), ScheduledRow(decoding, 2))
    logits = torch.zeros(3, 96)
    for row, token in enumerate((11, 22, 33)):
        logits[row, token] = 1.0
    logits = logits.to(idle.config.device)
    assert idle.engine._sample(ScheduledStep(rows, is_decode=False), logits) == [None, 22, 33]
    assert idle.engine._sample(ScheduledStep(rows[:1], is_decode=False), logits[:1]) == [None]


def test_logits_that_are_not_finite_stop_the_step(idle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = idle.engine.runners["prefill"]
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda batch: run(batch).clone().fill_(torch.nan))
    with pytest.raises(BreakgraphError, match="not finite"):
        idle.generate([[1, 2]], GREEDY, use_tqdm=False)


class TestCapture:
    @pytest.fixture
    def engines(self, monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
        """The engines that LLM loads, which a caller never sees when its constructor raises."""
        seen: list[Engine] = []
        load = llm_module.load_engine

        def load_and_keep(config: Any) -> Engine:
            seen.append(load(config))
            return seen[-1]

        monkeypatch.setattr(llm_module, "load_engine", load_and_keep)
        return seen

    def test_a_failure_while_memory_is_measured(self, llama_folder: Path, device: torch.device) -> None:
        with pytest.MonkeyPatch.context() as patch:
            raise_at(patch, PlanFamily, "capture", 1, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt, match="injected"):
                LLM(str(llama_folder), device=str(device), **SMALL)

    # Two captures are prefill's, two are decode's.
    @pytest.mark.parametrize(("call", "error"), [(1, InjectedError), (2, KeyboardInterrupt), (4, InjectedError)])
    def test_a_failure_closes_everything(
        self, llama_folder: Path, device: torch.device, engines: list[Engine], call: int, error: type[BaseException]
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            capture = Engine.capture

            def capture_with_fault(engine: Engine, *args: Any) -> None:
                raise_at(patch, PlanFamily, "capture", call, error)
                capture(engine, *args)

            patch.setattr(Engine, "capture", capture_with_fault)
            with pytest.raises(error, match="injected"):
                LLM(str(llama_folder), device=str(device), **SMALL)
        assert_closed(engines)

    @pytest.mark.parametrize(("call", "error"), [(4, KeyboardInterrupt), (14, InjectedError)])
    def test_an_exception_in_a_break_during_capture_too(
        self,
        llama_folder: Path,
        device: torch.device,
        engines: list[Engine],
        reference: Reference,
        idle: LLM,
        call: int,
        error: type[BaseException],
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            capture = Engine.capture

            def capture_with_fault(engine: Engine, *args: Any) -> None:
                raise_at(patch, attention_classes(idle)[-1], "forward", call, error)
                capture(engine, *args)

            patch.setattr(Engine, "capture", capture_with_fault)
            with pytest.raises(error, match="injected"):
                LLM(str(llama_folder), device=str(device), **SMALL)
        assert_closed(engines)
        with LLM(str(llama_folder), device=str(device), **SMALL) as again:
            outputs = again.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [reference(prompt, 8) for prompt in PROMPTS]


def assert_closed(engines: list[Engine]) -> None:
    (engine,) = engines
    assert engine.family.pool_bytes == 0
    assert engine.kv is None
    assert not engine.runners
    with pytest.raises(ClosedError):
        engine.family.capture(lambda: torch.zeros(1))
