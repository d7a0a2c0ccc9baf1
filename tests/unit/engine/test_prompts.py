from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest

from breakgraph.engine import prompts as ways
from breakgraph.engine.prompts import TokenPrompt, as_prompt_list, tokenize
from breakgraph.errors import ConfigError, PromptError


def encode(text: str) -> list[int]:
    return list(text.encode())


ARRAY = np.array([1, 2])


class Named(IntEnum):
    EIGHT = 8


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt_token_ids": [1]}, [{"prompt_token_ids": [1]}]),
        (["ab", [1], {"prompt": "c"}], ["ab", [1], {"prompt": "c"}]),
        ([], []),
        ([[]], [[]]),
        ([ARRAY], [ARRAY]),
    ],
)
def test_one_prompt_or_many(prompts: object, expected: list[object]) -> None:
    assert as_prompt_list(prompts) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [5, None, 1.5, {1, 2}])
def test_something_else_is_refused(prompts: object) -> None:
    with pytest.raises(ConfigError, match="prompts must be text, token ids, a dict, or a list"):
        as_prompt_list(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", TokenPrompt([97, 98], "ab")),
        ({"prompt": "ab"}, TokenPrompt([97, 98], "ab")),
        ([5, 6], TokenPrompt([5, 6])),
        ((5, 6), TokenPrompt([5, 6])),
        ({"prompt_token_ids": [5]}, TokenPrompt([5])),
        ([], TokenPrompt([])),
        ([np.int64(7)], TokenPrompt([7])),
        ([5, np.int64(7), np.uint8(9), Named.EIGHT], TokenPrompt([5, 7, 9, 8])),
    ],
)
def test_every_form_becomes_token_ids(prompt: object, expected: TokenPrompt) -> None:
    assert tokenize(prompt, encode) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        [1, "a"],
        [1.0],
        [True],
        [5, True],
        [5, ARRAY[:1]],
        ARRAY,
        {"prompt": [1]},
        {"prompt_token_ids": "ab"},
        {"text": "ab"},
        {"prompt": "ab", "prompt_token_ids": [1]},
        {},
    ],
)
def test_a_malformed_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(PromptError, match="prompt"):
        tokenize(prompt, encode)  # type: ignore[arg-type]


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(PromptError, match=r"not valid Unicode: '\\udcff' at 1"):
        ways.encode(None, "a\udcff")


@pytest.mark.parametrize("conversation", ["hi", {"role": "user"}, [], ["hi"], [{"content": "hi"}]])
def test_what_is_no_conversation_is_refused(conversation: object) -> None:
    tokenizer = SimpleNamespace(chat_template="a template")
    with pytest.raises(PromptError, match="a conversation is a list of messages, dicts with 'role'"):
        ways.apply_chat_template(tokenizer, conversation, "a model")  # type: ignore[arg-type]
