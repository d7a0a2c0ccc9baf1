"""Text in, text out: tokenizer, stop strings, chat, and models that have no tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from breakgraph import LLM, SamplingParams
from breakgraph.engine.outputs import CompletionOutput
from breakgraph.errors import ConfigError
from unit.engine.byte_tokenizer import EOS
from unit.engine.small import SMALL, Reference

PROMPTS = ["once upon a time", "é is one character and two tokens", "x"]


def complete(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    options = {"temperature": 0, "max_tokens": 24, **params}
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0].outputs[0]


def test_text_is_what_the_tokenizer_says(idle: LLM, reference: Reference) -> None:
    assert idle.tokenizer is not None
    outputs = idle.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == idle.tokenizer(prompt).input_ids
        completion = output.outputs[0]
        assert completion.token_ids == reference(output.prompt_token_ids, len(completion.token_ids))
        assert completion.text == idle.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_token_prompts_have_text_answers_too(idle: LLM) -> None:
    assert idle.tokenizer is not None
    prompt = idle.tokenizer(PROMPTS[0]).input_ids
    assert complete(idle, [prompt]).text == complete(idle, PROMPTS[0]).text != ""


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stop_string_cuts_the_text_and_ends_the_request(idle: LLM, prompt: str) -> None:
    whole = complete(idle, prompt)
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    stopped = complete(idle, prompt, stop=["never to be seen", stop])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (whole.text[:at], "stop", stop)
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < len(whole.token_ids)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stop_string_that_never_comes_changes_nothing(idle: LLM, prompt: str) -> None:
    assert complete(idle, prompt, stop="never to be seen") == complete(idle, prompt)


def test_end_of_sequence_comes_from_the_model_folder(
    llama_folder: Path, device: torch.device, idle: LLM, tmp_path: Path
) -> None:
    whole = complete(idle, PROMPTS[0])
    ends_at = whole.token_ids[6]
    first = whole.token_ids.index(ends_at)
    folder = tmp_path / "with-eos"
    shutil.copytree(llama_folder, folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{ends_at}]}}')
    with LLM(str(folder), device=str(device), **SMALL) as llm:
        ended = complete(llm, PROMPTS[0])
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (whole.token_ids[: first + 1], "stop", None)
        assert llm.tokenizer is not None
        assert ended.text == llm.tokenizer.decode(whole.token_ids[:first])
        assert complete(llm, PROMPTS[0], ignore_eos=True) == whole


def test_stop_token_ids_are_named_as_the_reason(idle: LLM) -> None:
    whole = complete(idle, PROMPTS[0])
    token = whole.token_ids[4]
    stopped = complete(idle, PROMPTS[0], stop_token_ids=[token])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]


def test_chat_goes_through_the_template(idle: LLM) -> None:
    assert idle.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=8)
    conversations = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "a"}] * 2]
    outputs = idle.chat(conversations, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["<user>hello=", "<user>a<user>a="]
    # <user> is one token, not six
    assert [len(output.prompt_token_ids) for output in outputs] == [7, 5]
    one = idle.chat(conversations[0], params, use_tqdm=False)
    assert [output.outputs for output in one] == [outputs[0].outputs]


def test_special_tokens_are_not_shown(idle: LLM) -> None:
    assert idle.tokenizer is not None
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=100, ignore_eos=True)
    completion = idle.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert idle.tokenizer.eos_token_id in completion.token_ids, "choose another seed"
    assert EOS not in completion.text


@pytest.fixture(scope="module")
def dummy(llama_folder: Path, device: torch.device) -> Iterator[LLM]:
    options = {**SMALL, "decode_backend": "eager", "prefill_backend": "eager"}
    with LLM(str(llama_folder), load_format="dummy", device=str(device), **options) as llm:
        yield llm


class TestWithoutTokenizer:
    def test_token_ids_work_and_there_is_no_text(self, dummy: LLM) -> None:
        completion = complete(dummy, [1, 2, 3])
        assert len(completion.token_ids) == 24
        assert completion.text == ""

    def test_weights_are_random_and_follow_the_seed(self, dummy: LLM, llama_folder: Path, device: torch.device) -> None:
        options = {**SMALL, "decode_backend": "eager", "prefill_backend": "eager", "device": str(device)}
        found = []
        for seed in (0, 1):
            with LLM(str(llama_folder), load_format="dummy", seed=seed, **options) as llm:
                found.append(complete(llm, [1, 2, 3]).token_ids)
        assert found[0] == complete(dummy, [1, 2, 3]).token_ids != found[1]

    @pytest.mark.parametrize("call", ["generate", "chat"])
    def test_text_is_refused_with_the_way_out(self, dummy: LLM, call: str) -> None:
        prompts: Any = "hi" if call == "generate" else [{"role": "user", "content": "hi"}]
        with pytest.raises(ConfigError, match=r"load_format='dummy' has none; pass token ids: .*prompt_token_ids"):
            getattr(dummy, call)(prompts, use_tqdm=False)

    def test_stop_strings_are_refused(self, dummy: LLM) -> None:
        with pytest.raises(ConfigError, match=r"stop=\['a'\] needs a tokenizer"):
            complete(dummy, [1], stop="a")

    def test_a_folder_without_one_says_so(self, llama_folder: Path, device: torch.device, tmp_path: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            shutil.copy(llama_folder / name, tmp_path / name)
        options = {**SMALL, "decode_backend": "eager", "prefill_backend": "eager"}
        with (
            LLM(str(tmp_path), device=str(device), **options) as llm,
            pytest.raises(ConfigError, match="the model folder has none"),
        ):
            llm.generate("hi", use_tqdm=False)


def test_a_tokenizer_without_template_refuses_chat(idle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="no chat template; use generate"):
        idle.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
