"""LLM on a tiny random llama: the same tokens as transformers, in every mix of requests."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph import LLM, SamplingParams
from breakgraph.errors import (
    ClosedError,
    ConfigError,
    EmptyPromptError,
    PromptError,
    PromptTooLongError,
    RequestTooLargeError,
    UnknownNameError,
)
from breakgraph.runners import StepBatch
from unit.engine.small import SMALL, Reference

GREEDY = SamplingParams(temperature=0, max_tokens=10)


def make_prompts(count: int, longest: int = 50, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def token_ids(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def watch_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[int]]]:
    """q_lens of every step from now on, by phase."""
    seen: dict[str, list[list[int]]] = {}
    for phase, runner in llm.engine.runners.items():
        steps = seen[phase] = []

        def run(batch: StepBatch, run: Callable[..., Any] = runner.run, steps: list[list[int]] = steps) -> Any:
            steps.append(list(batch.q_lens))
            return run(batch)

        monkeypatch.setattr(runner, "run", run)
    return seen


@pytest.mark.parametrize("num_prompts", range(1, 9))
def test_greedy_tokens_are_transformers_own(idle: LLM, reference: Reference, num_prompts: int) -> None:
    prompts = make_prompts(num_prompts, seed=num_prompts)
    assert token_ids(idle, prompts) == [reference(prompt, 10) for prompt in prompts]


def test_more_requests_than_fit_one_step(idle: LLM, reference: Reference) -> None:
    prompts = make_prompts(20, seed=20)
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 7) for i in range(20)]
    assert token_ids(idle, prompts, params) == [
        reference(p, s.max_tokens) for p, s in zip(prompts, params, strict=True)
    ]


@pytest.mark.parametrize(
    ("prefill_backend", "decode_backend"),
    [
        ("eager", "eager"),
        ("debug_eager", "breakable"),
        ("breakable", "debug_eager"),
        ("full", "full"),
        ("auto", "auto"),
        ("tc_piecewise", "tc_piecewise"),
    ],
)
def test_every_backend_gives_the_same_tokens(
    llama_folder: Path, device: torch.device, reference: Reference, prefill_backend: str, decode_backend: str
) -> None:
    prompts = make_prompts(5, seed=1)
    backends = {"prefill_backend": prefill_backend, "decode_backend": decode_backend}
    with LLM(str(llama_folder), device=str(device), **SMALL, **backends) as llm:
        assert token_ids(llm, prompts) == [reference(prompt, 10) for prompt in prompts]
        for phase, runner in llm.stats()["runners"].items():
            is_eager = backends[f"{phase}_backend"] == "eager"
            assert bool(runner["num_eager_steps_by_reason"]) is is_eager
            assert bool(runner["num_replays_by_bucket"]) is not is_eager


def test_fused_layers_give_the_same_tokens(
    llama_folder: Path, device: torch.device, reference: Reference
) -> None:
    prompts = make_prompts(5, seed=1)
    with LLM(str(llama_folder), device=str(device), **SMALL, fusion="inductor") as llm:
        assert token_ids(llm, prompts) == [reference(prompt, 10) for prompt in prompts]
        assert all(not runner["num_eager_steps_by_reason"] for runner in llm.stats()["runners"].values())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_fused_layers_are_refused_where_the_forward_is_traced(llama_folder: Path, phase: str) -> None:
    options = {"fusion": "inductor", f"{phase}_backend": "tc_piecewise"}
    with pytest.raises(ConfigError, match=r"backend 'tc_piecewise' traces the whole forward.*use fusion='none'"):
        LLM(str(llama_folder), device="cpu", **SMALL, **options)


def test_more_requests_than_slots_run_eagerly_with_the_same_tokens(
    llama_folder: Path, device: torch.device, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(6, longest=12, seed=2)
    options = {**SMALL, "prefill_backend": "full", "prefill_request_slots": 2}
    with LLM(str(llama_folder), device=str(device), **options) as llm:
        steps = watch_steps(llm, monkeypatch)
        for group in (prompts[:2], prompts):
            assert token_ids(llm, group) == [reference(prompt, 10) for prompt in group]
        stats = llm.stats()["runners"]["prefill"]
    crowded = sum(len(q_lens) > 2 for q_lens in steps["prefill"])
    assert stats["num_eager_steps_by_reason"] == {"too_many_requests": crowded}
    assert 0 < crowded < len(steps["prefill"])
    assert sum(stats["num_replays_by_bucket"].values()) == len(steps["prefill"]) - crowded


def test_chunks_and_decodes_share_prefill_steps_and_pure_decodes_have_their_own(
    idle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = watch_steps(idle, monkeypatch)
    token_ids(idle, [[1] * 10, [2] * 40])
    # 10 and a chunk of 6; then a decode and a chunk of 15; ...
    assert steps["prefill"] == [[10, 6], [1, 15], [1, 15], [1, 4]]
    assert steps["decode"] == [[1, 1]] * 6 + [[1]] * 3


def test_f34_steps_beyond_the_largest_bucket_run_eagerly_with_a_counted_reason(
    llama_folder: Path, device: torch.device, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**SMALL, "prefill_buckets": (4,), "decode_buckets": (2,)}
    prompts = make_prompts(4, seed=3)
    with LLM(str(llama_folder), device=str(device), **options) as llm:
        assert token_ids(llm, prompts) == [reference(prompt, 10) for prompt in prompts]
        runners = llm.stats()["runners"]
    assert runners["prefill"]["num_eager_steps_by_reason"]["too_many_tokens"] > 0
    assert runners["decode"]["num_eager_steps_by_reason"]["too_many_requests"] > 0
    assert "larger steps run eagerly" in caplog.text


def test_a_seeded_request_has_the_same_tokens_alone_and_in_a_crowd(idle: LLM) -> None:
    prompts = make_prompts(7, seed=4)
    seeded = SamplingParams(temperature=1.2, top_p=0.95, seed=11, max_tokens=20)
    alone = token_ids(idle, [prompts[0]], seeded)[0]
    others = [SamplingParams(max_tokens=5), SamplingParams(temperature=0), SamplingParams(seed=3, top_k=5)] * 2
    crowd = token_ids(idle, [*prompts[1:4], prompts[0], *prompts[4:]], [*others[:3], seeded, *others[3:]])
    assert crowd[3] == alone
    assert token_ids(idle, [prompts[0]], seeded)[0] == alone
    assert token_ids(idle, [prompts[0]], SamplingParams(temperature=1.2, seed=12, max_tokens=20))[0] != alone


@pytest.mark.parametrize(
    "form",
    [lambda p: p, lambda p: {"prompt_token_ids": p}, lambda p: [p], lambda p: [{"prompt_token_ids": p}], tuple],
    ids=["ids", "dict", "list of ids", "list of dicts", "tuple"],
)
def test_token_prompts_in_every_form(idle: LLM, reference: Reference, form: Callable[[list[int]], Any]) -> None:
    prompt = [5, 6, 7]
    assert token_ids(idle, form(prompt)) == [reference(prompt, 10)]


def test_no_prompts_no_outputs(idle: LLM) -> None:
    assert idle.generate([], use_tqdm=False) == []


def test_outputs_are_in_order_and_say_what_they_answer(idle: LLM) -> None:
    prompts = make_prompts(6, seed=5)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (9, 1, 5, 2, 7, 3)]
    outputs = idle.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 2, 7, 3]
    assert all(output.finished and output.prompt is None for output in outputs)
    assert len({output.request_id for output in outputs}) == 6


def test_an_answer_ends_where_the_context_does(idle: LLM) -> None:
    output = idle.generate([1] * 120, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (8, "length")


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([[1], []], EmptyPromptError, "one token at least"),
        ("", EmptyPromptError, "one token at least"),
        ([[1], [1] * 128], PromptTooLongError, "128 tokens, max_model_len=128 .*the model allows 512"),
        ([[1], [96]], PromptError, "token id 96 is not in the vocabulary of 96"),
        ([[1], [-1]], PromptError, "token id -1"),
        ([[1], 1.5], PromptError, "a prompt must be text"),
    ],
)
def test_a_bad_prompt_stops_the_call_before_anything_runs(
    idle: LLM, monkeypatch: pytest.MonkeyPatch, prompts: Any, error: type[Exception], message: str
) -> None:
    steps = watch_steps(idle, monkeypatch)
    with pytest.raises(error, match=message):
        idle.generate(prompts, GREEDY, use_tqdm=False)
    assert steps == {"prefill": [], "decode": []}


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_params_as_prompts(idle: LLM, count: int) -> None:
    with pytest.raises(ConfigError, match=f"each of the 2 prompts, got {count}"):
        idle.generate([[1], [2]], [GREEDY] * count, use_tqdm=False)


@pytest.mark.parametrize("params", ["hot", {"max_tokens": 1}, [{"max_tokens": 1}], [None], 3])
def test_params_of_another_kind_are_refused(idle: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match="sampling_params must be SamplingParams"):
        idle.generate([[1]], params)


def test_a_request_that_never_fits_is_refused_and_others_wait_their_turn(
    llama_folder: Path, device: torch.device, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**SMALL, "num_gpu_blocks_override": 4}  # 48 tokens
    with LLM(str(llama_folder), device=str(device), **options) as llm:
        with pytest.raises(RequestTooLargeError, match=r"needs 4 KV blocks of 16 tokens .* the cache has 3"):
            token_ids(llm, [[1], [1] * 40])
        steps = watch_steps(llm, monkeypatch)
        prompts = make_prompts(6, longest=20, seed=6)
        assert token_ids(llm, prompts) == [reference(prompt, 10) for prompt in prompts]
        assert max(len(q_lens) for q_lens in steps["decode"]) <= 3


def test_prompt_of_the_longest_length_fits_the_default_cache(idle: LLM, reference: Reference) -> None:
    prompts = [[7 + i] * 127 for i in range(8)]
    assert token_ids(idle, prompts) == [reference(prompt, 1) for prompt in prompts]


class TestOptions:
    def test_context_beyond_the_models_is_refused(self, llama_folder: Path) -> None:
        with pytest.raises(ConfigError, match="max_model_len=513 is beyond the 512 positions"):
            LLM(str(llama_folder), device="cpu", max_model_len=513)

    @pytest.mark.parametrize("option", ["prefill_backend", "decode_backend", "attention"])
    def test_an_unknown_name_lists_the_known(self, llama_folder: Path, option: str) -> None:
        with pytest.raises(UnknownNameError, match=r"'nonesuch'; known: .*(eager|sdpa)"):
            LLM(str(llama_folder), device="cpu", **{option: "nonesuch"})

    def test_more_slots_than_requests_are_refused(self, llama_folder: Path) -> None:
        with pytest.raises(ConfigError, match="prefill_request_slots=9 is more than max_num_seqs=8"):
            LLM(str(llama_folder), device="cpu", prefill_backend="full", prefill_request_slots=9, **SMALL)

    def test_open_choices_are_settled_in_config(self, idle: LLM, device: torch.device) -> None:
        assert idle.config.dtype == "float32"
        assert torch.device(idle.config.device).type == device.type


class TestStats:
    def test_plain_data_that_says_what_was_captured(self, idle: LLM) -> None:
        token_ids(idle, [[1] * 5])
        stats = json.loads(json.dumps(idle.stats()))
        prefill, decode = stats["runners"]["prefill"], stats["runners"]["decode"]
        assert (prefill["backend"], prefill["captured_buckets"], prefill["num_breaks"]) == ("breakable", [4, 16], 2)
        assert prefill["num_segments"] == 3
        assert (decode["backend"], decode["captured_buckets"]) == ("full", [2, 8])
        assert (decode["num_segments"], decode["num_breaks"]) == (1, 0)
        assert prefill["capture_sec"] > 0
        assert stats["pool_bytes"] > 0
        assert stats["attention"].keys() == {"prefill", "decode"}
        assert stats["emulated"] is (stats["device"] == "cpu")

    def test_explain_has_a_report_for_each_bucket(self, idle: LLM) -> None:
        reports = idle.explain()
        assert [str(key) for key in reports] == ["prefill[16]", "prefill[4]", "decode[8]", "decode[2]"]
        assert "2 breaks" in str(next(iter(reports.values())))


def test_nothing_is_written_when_stderr_is_no_terminal(idle: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    idle.generate([[1], [2]], GREEDY)
    assert capfd.readouterr() == ("", "")


def test_a_bar_counts_prompts_on_a_terminal(
    idle: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    idle.generate([[1], [2]], GREEDY)
    assert "2/2" in capsys.readouterr().err
    idle.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


class TestClose:
    def test_closed_means_closed(self, llama_folder: Path, device: torch.device) -> None:
        with LLM(llama_folder, device=str(device), **SMALL) as llm:
            pass
        llm.close()
        calls: Sequence[Callable[[], object]] = (
            lambda: llm.generate([[1]], use_tqdm=False),
            llm.stats,
            llm.explain,
            llm.reset_prefix_cache,
        )
        for call in calls:
            with pytest.raises(ClosedError, match="closed"):
                call()

    def test_weights_cache_and_plans_are_let_go(self, llama_folder: Path, device: torch.device) -> None:
        llm = LLM(str(llama_folder), device=str(device), **SMALL)
        runner = llm.engine.runners["prefill"]
        assert llm.engine.kv is not None
        held = [weakref.ref(runner), weakref.ref(llm.engine.kv.key[0]), weakref.ref(runner.forward)]
        del runner
        llm.close()
        gc.collect()
        assert [ref() for ref in held] == [None, None, None]

    def test_an_exception_in_the_block_closes_too(self, llama_folder: Path, device: torch.device) -> None:
        with pytest.raises(RuntimeError, match="mine"), LLM(str(llama_folder), device=str(device), **SMALL) as llm:
            raise RuntimeError("mine")
        with pytest.raises(ClosedError):
            llm.stats()
