"""Guides that need time: their answers wait, others go on, and nothing of an answer changes by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from breakgraph import LLM, GuidedDecodingParams, SamplingParams
from breakgraph.engine.guide import Guide, known_masks
from breakgraph.engine.request import Request
from tiny_models import save_tiny_model
from unit.engine.byte_tokenizer import ascii_tokenizer
from unit.engine.small import SMALL

FORM = GuidedDecodingParams(regex="[a-z]{3}(, [a-z]{3}){4}")
PROMPT = list(range(1, 20))


class SlowGuide:
    """Knows only when it is allowed to, and at every third time that it is asked."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        self._num_asked = 0
        self.is_held = False
        self.waited_sec: list[float] = []

    @property
    def failure(self) -> str | None:
        return self._guide.failure

    def allowed(self) -> Tensor | None:
        self._num_asked += 1
        return None if self.is_held or self._num_asked % 3 else self._guide.allowed()

    def wait(self, timeout_sec: float) -> None:
        self.waited_sec.append(timeout_sec)

    def accept(self, token_id: int) -> None:
        self._guide.accept(token_id)


class SlowGrammar:
    def __init__(self, llm: LLM) -> None:
        self._grammar = llm.engine.grammars.compile(FORM)
        self.guides: list[SlowGuide] = []

    def guide(self) -> SlowGuide:
        self.guides.append(SlowGuide(self._grammar.guide()))
        return self.guides[-1]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models") / "ascii-llama"
    save_tiny_model("llama", folder, eos_token_id=95)
    ascii_tokenizer().save_pretrained(folder)
    with LLM(str(folder), device=str(device), **SMALL) as llm:
        yield llm


def answer(llm: LLM, *requests: Request) -> None:
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_requests:
        llm.engine.step()


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 5, "logprobs": 2},
    {"temperature": 0, "prompt_logprobs": 1},
    {"seed": 6, "presence_penalty": 1.5},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_answers_are_the_same_however_long_guides_take(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, guided_decoding=FORM, **options)
    free = SamplingParams(max_tokens=30, temperature=0)
    wanted = llm.generate([PROMPT] * 2, [params, free], use_tqdm=False)
    slow = SlowGrammar(llm)
    requests = [llm.engine.make_request(PROMPT, params, grammar=slow), llm.engine.make_request(PROMPT, free)]
    answer(llm, *requests)
    for request, expected in zip(requests, wanted, strict=True):
        output = request.output()
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].finish_reason == expected.outputs[0].finish_reason
        assert len(output.outputs[0].logprobs or ()) == len(expected.outputs[0].logprobs or ())
        assert len(output.prompt_logprobs or ()) == len(expected.prompt_logprobs or ())
    stats = llm.stats()
    assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1


def test_an_answer_that_waits_for_ever_delays_nobody(llm: LLM) -> None:
    slow, engine = SlowGrammar(llm), llm.engine
    waiting = engine.make_request(PROMPT, SamplingParams(temperature=0, guided_decoding=FORM), grammar=slow)
    free = engine.make_request(PROMPT, SamplingParams(max_tokens=9, temperature=0))
    slow.guides[0].is_held = True
    engine.add(waiting)
    engine.add(free)
    num_steps = 0
    while not free.is_finished:
        num_steps += 1
        engine.step()
    assert num_steps <= 10  # the two prompts may need a step each
    assert waiting.output_token_ids == []
    assert waiting.num_pending_tokens == 1
    # Alone it is waited for a little longer, and not for ever either.
    assert engine.step() == []
    *beside, alone = slow.guides[0].waited_sec
    assert max(beside) < alone < 1
    engine.abort([waiting.request_id])
    stats = llm.stats()
    assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1


def test_those_that_know_are_not_kept_waiting() -> None:
    class Known(SlowGuide):
        def allowed(self) -> Tensor | None:
            return None if self.is_held else torch.ones(1)

    known, held = (Known(None) for _ in range(2))  # type: ignore[arg-type]
    held.is_held = True
    assert known_masks({3: known, 5: held}, others_go_on=False).keys() == {3}
    assert known.waited_sec == []
    assert len(held.waited_sec) == 1
