"""Two small tokenizers: bytes as tokens, and words whose leading space the decoder strips at the start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.engine.detokenizer import MAX_PENDING_TOKENS, Detokenizer, find_stop

SPECIAL = 256


class ByteTokenizer:
    """Token = byte, as the rare characters of a byte-level BPE are; 256 is a special token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(t for t in token_ids if t != SPECIAL).decode("utf-8", errors="replace")


class FallbackTokenizer(ByteTokenizer):
    """One replacement for each byte that is no character yet, as byte-fallback decoders do."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        text, raw = "", bytes(t for t in token_ids if t != SPECIAL)
        while raw:
            for size in (1, 2, 3, 4):
                try:
                    text += raw[:size].decode("utf-8")
                    raw = raw[size:]
                    break
                except UnicodeDecodeError:
                    continue
            else:
                text, raw = text + "\N{REPLACEMENT CHARACTER}", raw[1:]
        return text


class WordTokenizer:
    """Tokens are words; a sentence that is decoded alone has no leading space."""

    WORDS = ("", "once", "upon", "a", "time")

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return " ".join(self.WORDS[t] for t in token_ids if t)


def stream(tokenizer: object, prompt: list[int], tokens: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, prompt)  # type: ignore[arg-type]
    pieces = [detokenizer.append([token]) for token in tokens]
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.text


TEXTS = st.text(st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}", codec="utf-8"), max_size=30)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), FallbackTokenizer()], ids=["bytes", "fallback"])
@given(prompt=TEXTS, answer=TEXTS)
def test_pieces_are_whole_characters_and_add_up(tokenizer: ByteTokenizer, prompt: str, answer: str) -> None:
    pieces, text = stream(tokenizer, list(prompt.encode()), list(answer.encode()))
    assert text == answer
    assert "".join(pieces) == answer
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    pieces, _ = stream(ByteTokenizer(), [], list("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_the_prompt_began_is_given_out() -> None:
    emoji = list("😀".encode())
    assert stream(ByteTokenizer(), [97, *emoji[:2]], [*emoji[2:], 98])[1] == "😀b"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    pieces, text = stream(ByteTokenizer(), [], [97, 0xF0, 0x9F])
    assert pieces == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert text == "a\N{REPLACEMENT CHARACTER}"


def test_invalid_bytes_do_not_hold_the_text_back_for_ever() -> None:
    detokenizer = Detokenizer(FallbackTokenizer(), [])
    tokens = [0x80] * (MAX_PENDING_TOKENS * 3)
    for token in tokens:
        detokenizer.append([token])
    assert len(detokenizer._window) <= 2 * MAX_PENDING_TOKENS + 2
    detokenizer.append(list(b" and on"))
    assert detokenizer.text.endswith(" and on")


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    pieces, text = stream(WordTokenizer(), [1, 2], [3, 4])
    assert pieces == [" a", " time", ""]
    assert text == " a time"


def test_special_tokens_have_no_text_and_are_no_context() -> None:
    pieces, text = stream(WordTokenizer(), [1], [2, 0, 0, 3])
    assert text == " upon a"
    assert pieces[1:3] == ["", ""]


def test_the_window_stays_short() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), list(b"prompt" * 50))
    for token in b"answer" * 50:
        detokenizer.append([token])
        assert len(detokenizer._window) <= 8


@pytest.mark.parametrize(
    ("text", "new", "stops", "hit"),
    [
        ("hello world", 5, ["world"], (6, "world")),
        ("hello world", 1, ["world"], (6, "world")),
        ("hello world", 5, ["hello"], None),
        ("abcabc", 3, ["abc"], (3, "abc")),
        ("one two", 7, ["two", "one"], (0, "one")),
        ("aaa", 1, ["x"], None),
        ("aaa", 0, [], None),
    ],
)
def test_find_stop(text: str, new: int, stops: list[str], hit: tuple[int, str] | None) -> None:
    assert find_stop(text, new, stops) == hit
