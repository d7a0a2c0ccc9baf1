"""Text in pieces: together they are the whole text, and nothing of a stop string is ever among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.engine.answer_text import AnswerText
from unit.engine.all_bytes import fallback_tokenizer


class ByteTokenizer:
    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def pieces(text: bytes, *stop: str) -> tuple[list[str], str | None]:
    answer = AnswerText(ByteTokenizer(), list(b"prompt "), stop)
    shown = []
    for token in text:
        shown.append(answer.append(token))
        if answer.stop_reason is not None:
            break
    shown.append(answer.finish())
    assert "".join(shown) == answer.shown
    return shown, answer.stop_reason


def test_each_character_comes_whole_with_its_last_byte() -> None:
    assert pieces("aé😀".encode()) == (["a", "", "é", "", "", "", "😀", ""], None)


def test_an_end_that_may_become_a_stop_string_is_held_back() -> None:
    assert pieces(b"12ENx", "END") == (["1", "2", "", "", "ENx", ""], None)
    assert pieces(b"12EN", "END") == (["1", "2", "", "", "EN"], None)
    assert pieces(b"12ENDx", "END") == (["1", "2", "", "", "", ""], "END")


def test_the_longest_beginning_of_any_stop_string_is_held_back() -> None:
    assert pieces(b"aab!", "aac", "b?") == (["", "", "aa", "b!", ""], None)


def test_unfinished_bytes_come_at_the_end() -> None:
    assert pieces("a😀".encode()[:-1])[0][-1] == "\N{REPLACEMENT CHARACTER}"


def test_nothing_comes_after_a_stop_string() -> None:
    answer = AnswerText(ByteTokenizer(), [], ["b"])
    assert [answer.append(token) for token in b"abab"] == ["a", "", "", ""]
    assert answer.finish() == ""


@given(st.text("abé😀", max_size=30), st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3))
def test_pieces_are_the_text_up_to_the_stop_string_that_is_complete_first(text: str, stop: list[str]) -> None:
    shown, reason = pieces(text.encode(), *stop)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        assert ("".join(shown), reason) == (text, None)
        return
    first = min(ends)[0]
    at, expected = min((start, s) for end, start, s in ends if end == first)
    assert "".join(shown) == text[:at]
    assert reason is not None
    assert text[at:].startswith(reason), expected


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_stop_strings_that_never_come_change_nothing(stop: list[str]) -> None:
    assert "".join(pieces("é is one, 😀 too".encode(), *stop)[0]) == "é is one, 😀 too"


@pytest.mark.parametrize("stop", ["a", " a", "吗", "好吗", "好\n", "吗 a"])
def test_a_stop_string_after_characters_that_the_vocabulary_lacks(stop: str) -> None:
    tokenizer = fallback_tokenizer()
    text = "😀你好\n你好吗 a b"
    answer = AnswerText(tokenizer, tokenizer("b 😀😀").input_ids, [stop])
    shown = [answer.append(token) for token in tokenizer(text).input_ids[1:]]
    assert answer.stop_reason == stop
    assert "".join(shown) + answer.finish() == answer.shown == text[: text.index(stop)]


def test_each_character_that_the_vocabulary_lacks_comes_with_its_last_byte() -> None:
    tokenizer = fallback_tokenizer()
    answer = AnswerText(tokenizer, tokenizer("a").input_ids, ["zzz"])
    shown = [answer.append(token) for token in tokenizer("你😀 a").input_ids[1:]]
    assert shown == ["", "", "你", "", "", "", "😀", " ", "a"]
    assert answer.finish() == ""
