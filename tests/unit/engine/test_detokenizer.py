"""Small tokenizers: bytes as tokens, words whose leading space the decoder strips at the start; and real ones."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.engine.detokenizer import MAX_PENDING_TOKENS, MAX_UNFINISHED, Detokenizer, find_stop
from unit.engine.all_bytes import byte_level_tokenizer, fallback_ids, fallback_tokenizer

SPECIAL = 256
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FALLBACK = fallback_tokenizer()
BYTE_LEVEL = byte_level_tokenizer()


class ByteTokenizer:
    """Token = byte, as the rare characters of a byte-level BPE are; 256 is a special token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(t for t in token_ids if t != SPECIAL).decode("utf-8", errors="replace")


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


@given(prompt=TEXTS, answer=TEXTS)
def test_pieces_are_whole_characters_and_add_up(prompt: str, answer: str) -> None:
    pieces, text = stream(ByteTokenizer(), list(prompt.encode()), list(answer.encode()))
    assert text == answer
    assert "".join(pieces) == answer
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    pieces, _ = stream(ByteTokenizer(), [], list("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_the_prompt_began_is_given_out() -> None:
    emoji = list("😀".encode())
    assert stream(ByteTokenizer(), [97, *emoji[:2]], [*emoji[2:], 98])[1] == "😀b"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    pieces, text = stream(ByteTokenizer(), [], [97, 0xF0, 0x9F])
    assert pieces == ["a", "", "", REPLACEMENT]
    assert text == f"a{REPLACEMENT}"


@pytest.mark.parametrize("first", ["", "a", "你"])
def test_invalid_bytes_do_not_hold_the_text_back_for_ever(first: str) -> None:
    detokenizer = Detokenizer(FALLBACK, [])
    detokenizer.append(ids(first))
    for num_bytes in range(1, 100):
        detokenizer.append(broken(b"\x80"))
        assert len(detokenizer._context) + len(detokenizer._pending) <= 2 * MAX_UNFINISHED
        assert detokenizer.text == first + REPLACEMENT * (num_bytes - MAX_UNFINISHED)
    detokenizer.append(ids("好 on"))
    assert detokenizer.text == first + REPLACEMENT * 99 + "好 on"


def test_tokens_without_text_do_not_make_the_window_longer() -> None:
    for prompt in ([], [1]):
        detokenizer = Detokenizer(WordTokenizer(), prompt)
        for _ in range(MAX_PENDING_TOKENS * 3):
            detokenizer.append([0])
        assert len(detokenizer._pending) == MAX_PENDING_TOKENS
        assert detokenizer.append([2]) == (" upon" if prompt else "upon")


def test_the_rest_of_a_broken_character_is_not_given_out_twice() -> None:
    for prompt in ([], [97]):
        tokens = [0xF0, 0x9F, 0x98, 0xE4]
        assert stream(BYTE_LEVEL, prompt, tokens)[1] == BYTE_LEVEL.decode(tokens) == REPLACEMENT * 2


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
        assert len(detokenizer._context) + len(detokenizer._pending) <= 8


def ids(text: str) -> list[int]:
    """Tokens of `text` where it follows other text."""
    tokens: list[int] = FALLBACK(text, add_special_tokens=False).input_ids
    return tokens[1:]


def broken(raw: bytes) -> list[int]:
    """Byte tokens."""
    return fallback_ids(FALLBACK, raw)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("replace-each-byte", _replace_each_byte)


@pytest.mark.parametrize("prompt", [" ", "a", "a 😀😀", "你好吗你好吗", "\n你"])
@pytest.mark.parametrize("answer", ["你好吗 a", "a你好", "😀😀", "\n\n你\n好", "  é你a好"])
def test_characters_that_the_vocabulary_lacks(prompt: str, answer: str) -> None:
    pieces, text = stream(FALLBACK, FALLBACK(prompt).input_ids, ids(answer))
    whole = FALLBACK.decode(FALLBACK(prompt).input_ids + ids(answer))
    assert whole == prompt + answer
    assert text == "".join(pieces) == answer
    assert [piece for piece in pieces if piece] == list(answer)


def test_a_broken_byte_leaves_the_characters_beside_it() -> None:
    assert stream(FALLBACK, [], ids("a你") + broken(b"\x80") + ids("好\nb"))[1] == f"a你{REPLACEMENT}好\nb"
    assert stream(FALLBACK, ids("a你") + broken(b"\x80"), ids("好 b"))[1] == "好 b"


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_an_unfinished_character_after_a_whole_one(missing: int) -> None:
    tokens = ids("你😀")[:-missing]
    detokenizer = Detokenizer(FALLBACK, ids("a"))
    assert detokenizer.append(tokens) == "你"
    assert detokenizer.finish() == REPLACEMENT * (4 - missing)
    assert detokenizer.finish() == ""


def test_special_tokens_among_the_bytes_of_a_character() -> None:
    special, character = [FALLBACK.eos_token_id], ids("😀")
    assert stream(FALLBACK, ids("a"), character[:2] + special * 9 + character[2:])[1] == "😀"


@pytest.mark.parametrize("raw", [b"\x80", b"\xf0\x9f", b"\x80\x80\x80\x80\xe4", b"\xe4" * 9])
def test_broken_bytes_of_the_prompt_are_not_the_answer_s(raw: bytes) -> None:
    assert stream(FALLBACK, ids("a") + broken(raw), ids(" b你"))[1] == " b你"
    assert stream(FALLBACK, ids("a") + broken(raw), ids("你b"))[1] == "你b"
    assert stream(FALLBACK, broken(raw), broken(b"\xff"))[1] == REPLACEMENT
    assert stream(BYTE_LEVEL, list(b"a" + raw), list("你 b".encode()))[1] == "你 b"


def test_a_character_that_the_prompt_began_in_a_run_of_bytes() -> None:
    tokens = ids("你😀好b")
    assert stream(FALLBACK, tokens[:5], tokens[5:])[1] == "😀好b"


PARTS = st.one_of(
    st.sampled_from(["a", "b", " ", " c", "\n", "é", "你", "好", "😀"]).map(str.encode),
    st.sampled_from([b"\x80", b"\xe4", b"\xf0\x9f", b"\xe4\xbd", b"\xff"]),
)
BYTES = st.lists(PARTS, max_size=20).map(b"".join)


def in_chunks(tokenizer: object, prompt: list[int], tokens: list[int], sizes: list[int]) -> str:
    """The text; the last of `sizes` is for all the rest."""
    detokenizer = Detokenizer(tokenizer, prompt)  # type: ignore[arg-type]
    shown, rest = "", tokens
    while rest:
        size = sizes[0] if len(sizes) == 1 else sizes.pop(0)
        shown += detokenizer.append(rest[:size])
        rest = rest[size:]
    shown += detokenizer.finish()
    assert shown == detokenizer.text
    return shown


SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=20) | st.just([1])


def mixed_ids(raw: bytes) -> list[int]:
    """Vocabulary characters as their tokens, all else byte by byte."""
    known = {b"a"[0]: "a", b"b"[0]: "b", b"c"[0]: "c", b" "[0]: "▁"}
    return [FALLBACK.convert_tokens_to_ids(known[b]) if b in known else broken(bytes([b]))[0] for b in raw]


@given(prompt=st.text("ab 你好😀\n", max_size=12), raw=BYTES, sizes=SIZES)
def test_byte_fallback_in_chunks_is_the_whole(prompt: str, raw: bytes, sizes: list[int]) -> None:
    prompt_ids, tokens = FALLBACK("a" + prompt).input_ids, mixed_ids(raw)
    text = in_chunks(FALLBACK, prompt_ids, tokens, sizes)
    assert text == raw.decode("utf-8", "replace-each-byte")
    whole = FALLBACK.decode(prompt_ids + tokens)
    # The decoder replaces whole characters too if they stand beside broken bytes.
    if REPLACEMENT not in whole:
        assert "a" + prompt + text == whole


@given(prompt=BYTES, raw=BYTES, sizes=SIZES)
def test_byte_level_in_chunks_is_the_whole(prompt: bytes, raw: bytes, sizes: list[int]) -> None:
    prompt_ids, tokens = list(prompt), list(raw)
    before, whole = BYTE_LEVEL.decode(prompt_ids), BYTE_LEVEL.decode(prompt_ids + tokens)
    num_common = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    assert in_chunks(BYTE_LEVEL, prompt_ids, tokens, sizes) == whole[num_common:]


@given(raw=BYTES, cuts=st.lists(st.integers(1, 7), min_size=1, max_size=30), sizes=SIZES)
def test_tokens_of_many_bytes_are_the_whole(raw: bytes, cuts: list[int], sizes: list[int]) -> None:
    class Bytes:
        def decode(self, token_ids: list[bytes], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            return b"".join(token_ids).decode("utf-8", errors="replace")

    tokens: list[bytes] = []
    rest = raw
    while rest:
        size = cuts[len(tokens) % len(cuts)]
        tokens.append(rest[:size])
        rest = rest[size:]
    assert in_chunks(Bytes(), [b"a"], tokens, sizes) == raw.decode("utf-8", "replace")  # type: ignore[arg-type,list-item]


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
