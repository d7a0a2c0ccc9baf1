"""OpenAI's own client: every parameter, whole and as a stream, compared with the LLM class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from breakgraph import LLM, SamplingParams
from breakgraph.engine.outputs import CompletionOutput
from unit.engine.byte_tokenizer import EOS
from unit.server.conftest import MODEL, SIZES

PROMPT = "once upon a time"
USER: list[Any] = [{"role": "user", "content": "hello"}]
CHAT_TEXT = "<user>hello="


@pytest.fixture(scope="module")
def other(llama_folder: Path) -> Iterator[LLM]:
    """The same model, run eagerly, for the test itself."""
    with LLM(str(llama_folder), **SIZES, prefill_backend="eager", decode_backend="eager") as llm:
        yield llm


def expected(llm: LLM, prompt: Any, **params: Any) -> list[CompletionOutput]:
    options = {"temperature": 0, "max_tokens": 12, **params}
    llm.reset_prefix_cache()
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0].outputs


def complete(client: openai.OpenAI, **params: Any) -> Any:
    options = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **params}
    return client.completions.create(**options)


def chat(client: openai.OpenAI, **params: Any) -> Any:
    options = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 12, **params}
    return client.chat.completions.create(**options)


def streamed(chunks: Any) -> dict[int, tuple[str, str | None]]:
    """(text, finish_reason) by choice."""
    found: dict[int, tuple[str, str | None]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, reason = found.get(choice.index, ("", None))
            assert reason is None, "nothing comes after the end"
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            found[choice.index] = (text + (piece or ""), choice.finish_reason)
    return found


# As parameters of the request, and as SamplingParams; chosen so that each changes the answer.
PARAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "max_tokens": ({"max_tokens": 3}, {"max_tokens": 3}),
    "seed": ({"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 3}),
    "top_p": ({"temperature": 1.5, "seed": 3, "top_p": 0.5}, {"temperature": 1.5, "seed": 3, "top_p": 0.5}),
    "top_k": (
        {"temperature": 1.5, "seed": 3, "extra_body": {"top_k": 4}},
        {"temperature": 1.5, "seed": 3, "top_k": 4},
    ),
    "min_p": (
        {"temperature": 1.5, "seed": 3, "extra_body": {"min_p": 0.4}},
        {"temperature": 1.5, "seed": 3, "min_p": 0.4},
    ),
    "presence": ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    "frequency": ({"frequency_penalty": -2.0}, {"frequency_penalty": -2.0}),
    "repetition": ({"extra_body": {"repetition_penalty": 1.8}}, {"repetition_penalty": 1.8}),
    "n": ({"temperature": 1.5, "seed": 3, "n": 3}, {"temperature": 1.5, "seed": 3, "n": 3}),
    "stop": ({"stop": ["?+"]}, {"stop": ["?+"]}),
}


@pytest.mark.parametrize("name", PARAMS)
def test_answers_are_those_of_the_llm_class(client: openai.OpenAI, other: LLM, name: str) -> None:
    sent, params = PARAMS[name]
    for text, ask in ((PROMPT, complete), (CHAT_TEXT, chat)):
        wanted = {c.index: (c.text, c.finish_reason) for c in expected(other, text, **params)}
        whole = ask(client, **sent)
        found = {c.index: (c.text if hasattr(c, "text") else c.message.content, c.finish_reason) for c in whole.choices}
        assert found == wanted
        assert streamed(ask(client, stream=True, **sent)) == wanted


def test_the_parameters_above_change_the_answer(other: LLM) -> None:
    texts = [tuple(c.text for c in expected(other, PROMPT, **params)) for _, params in PARAMS.values()]
    different = [text for name, text in zip(PARAMS, texts, strict=True) if name != "stop"]
    assert len(set(different)) == len(different)


def test_a_stop_string_of_the_answer_ends_it(client: openai.OpenAI, other: LLM) -> None:
    whole = expected(other, PROMPT)[0]
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    for ask in ({}, {"stream": True}):
        response = complete(client, stop=["never seen", stop], **ask)
        text = streamed(response) if ask else {0: (response.choices[0].text, response.choices[0].finish_reason)}
        assert text == {0: (whole.text[:at], "stop")}


def test_usage_counts_the_tokens_up_to_the_stop_string(client: openai.OpenAI, other: LLM) -> None:
    whole = expected(other, PROMPT)[0]
    stop = whole.text[5:8]
    (stopped,) = expected(other, PROMPT, stop=stop)
    usage = complete(client, stop=stop).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), len(stopped.token_ids))
    assert usage.total_tokens == len(PROMPT) + len(stopped.token_ids)


def test_stop_token_ids_and_ignore_eos(client: openai.OpenAI, other: LLM) -> None:
    whole = expected(other, PROMPT)[0]
    token = whole.token_ids[5]
    wanted = expected(other, PROMPT, stop_token_ids=[token])[0]
    choice = complete(client, extra_body={"stop_token_ids": [token], "ignore_eos": True}).choices[0]
    assert (choice.text, choice.finish_reason) == (wanted.text, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_every_answer(client: openai.OpenAI, other: LLM, stream: bool) -> None:
    text = expected(other, PROMPT)[0].text
    token_ids = other.tokenizer(PROMPT).input_ids if other.tokenizer else []
    for prompt in (PROMPT, token_ids):
        response = complete(client, prompt=prompt, echo=True, n=2, stream=stream)
        found = streamed(response) if stream else {c.index: (c.text, c.finish_reason) for c in response.choices}
        assert found == dict.fromkeys(range(2), (PROMPT + text, "length"))


def test_several_prompts_are_numbered_through(client: openai.OpenAI, other: LLM) -> None:
    prompts = ["a", "b b"]
    response = complete(client, prompt=prompts, n=2)
    wanted = [expected(other, prompt)[0].text for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in response.choices] == wanted
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.usage.prompt_tokens == 4
    assert [choice.text for choice in complete(client, prompt=[[1, 2], [3]]).choices] == [
        expected(other, [ids])[0].text for ids in ([1, 2], [3])
    ]


def test_logprobs_of_completions(client: openai.OpenAI, other: LLM) -> None:
    (wanted,) = expected(other, PROMPT, logprobs=3)
    assert wanted.logprobs is not None
    choice = complete(client, logprobs=3).choices[0]
    assert "".join(choice.logprobs.tokens).replace(EOS, "") == choice.text
    assert choice.logprobs.token_logprobs == pytest.approx([token.logprob for token in wanted.logprobs])
    assert [len(top) for top in choice.logprobs.top_logprobs] == [3] * 12
    places = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    assert all(choice.text[at : at + 1] == token for token, at in places if token != EOS)
    parts = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=3, stream=True)]
    assert [token for part in parts for token in part.tokens] == choice.logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == choice.logprobs.text_offset


def test_echo_with_logprobs_has_those_of_the_prompt(client: openai.OpenAI, other: LLM) -> None:
    (wanted,) = other.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=2), use_tqdm=False
    )
    assert wanted.prompt_logprobs is not None
    completion = wanted.outputs[0]
    assert completion.logprobs is not None
    values = [token and token.logprob for token in (*wanted.prompt_logprobs, *completion.logprobs)]
    for choice in complete(client, echo=True, logprobs=2, n=2).choices:
        logprobs = choice.logprobs
        assert choice.text == PROMPT + completion.text
        assert "".join(logprobs.tokens).replace(EOS, "") == choice.text
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == pytest.approx(values[1:])
        places = zip(logprobs.tokens, logprobs.text_offset, strict=True)
        assert all(choice.text[at : at + 1] == token for token, at in places if token != EOS)
        chunks = [chunk.choices[0] for chunk in complete(client, echo=True, logprobs=2, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        assert [token for chunk in chunks for token in chunk.logprobs.tokens] == logprobs.tokens
        assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == logprobs.text_offset


def test_every_answer_has_the_prompts_logprobs_though_one_computes_them(client: openai.OpenAI) -> None:
    """Short answers to a longer prompt: the other answers have ended before its log probabilities are there."""
    prompts = ["a b", "a longer prompt"]

    def ask(**options: Any) -> Any:
        return complete(client, prompt=prompts, echo=True, logprobs=2, max_tokens=3, **options)

    wanted = [choice for choice in ask().choices for _ in range(3)]
    whole = ask(n=3).choices
    parts: list[list[Any]] = [[] for _ in wanted]
    for chunk in ask(n=3, stream=True):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    for index, (one, answer, chunks) in enumerate(zip(wanted, whole, parts, strict=True)):
        assert answer.index == index
        assert answer.text == "".join(chunk.text for chunk in chunks) == one.text
        assert answer.logprobs.tokens == [t for chunk in chunks for t in chunk.logprobs.tokens] == one.logprobs.tokens
        assert answer.logprobs.token_logprobs[1:] == pytest.approx(one.logprobs.token_logprobs[1:])
        assert [o for chunk in chunks for o in chunk.logprobs.text_offset] == one.logprobs.text_offset
        assert chunks[-1].finish_reason == one.finish_reason


def test_logprobs_of_chat(client: openai.OpenAI, other: LLM) -> None:
    (wanted,) = expected(other, CHAT_TEXT, logprobs=2)
    assert wanted.logprobs is not None
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [token.logprob for token in content] == pytest.approx([token.logprob for token in wanted.logprobs])
    assert "".join(token.token for token in content) == wanted.text
    assert b"".join(bytes(token.bytes) for token in content).decode() == wanted.text
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)
    chunks = list(chat(client, logprobs=True, stream=True))
    parts = [part for chunk in chunks if chunk.choices[0].logprobs for part in chunk.choices[0].logprobs.content]
    assert [part.token for part in parts] == [token.token for token in content]
    assert all(part.top_logprobs == [] for part in parts)


def test_a_stream_has_usage_only_when_it_is_asked_for(client: openai.OpenAI) -> None:
    for ask in (complete, chat):
        assert all(chunk.usage is None for chunk in ask(client, stream=True))
        chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
        assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1].choices == []
        assert chunks[-1].usage == ask(client).usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )


def test_chat_takes_parts_roles_and_another_name_for_max_tokens(client: openai.OpenAI, other: LLM) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "name": "me"},
    ]
    response = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=4, user="someone", tools=[]
    )
    assert response.choices[0].message.content == expected(other, "<user>a<user>bc=", max_tokens=4)[0].text


def test_chat_without_max_tokens_fills_the_context(client: openai.OpenAI, other: LLM) -> None:
    response = client.chat.completions.create(model=MODEL, messages=USER, temperature=0)
    assert response.choices[0].message.content == expected(other, CHAT_TEXT, max_tokens=1000)[0].text
    assert response.usage is not None
    assert response.usage.total_tokens == 128


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "a prompt that no other test has, longer than two blocks"
    first, second = (complete(client, prompt=prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2))
    assert (first, second) == (0, 48)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("a/b")


def test_errors_are_those_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, max_tokens=-1)
    assert (caught.value.param, caught.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="another")
    assert missing.value.code == "model_not_found"
