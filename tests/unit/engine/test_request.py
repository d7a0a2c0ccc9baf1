import pytest

from breakgraph.engine.detokenizer import Detokenizer
from breakgraph.engine.request import Request, RequestStatus
from breakgraph.engine.sampling import SamplingParams

EOS = 0


class ByteTokenizer:
    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def make_request(max_tokens: int = 20, prompt: str = "hi", **params: object) -> Request:
    prompt_token_ids = list(prompt.encode())
    return Request(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        max_total_tokens=len(prompt_token_ids) + max_tokens,
        eos_token_ids=frozenset({EOS}),
        detokenizer=Detokenizer(ByteTokenizer(), prompt_token_ids),
    )


def feed(request: Request, tokens: bytes) -> tuple[int, str, str | None, int | str | None]:
    """(tokens taken, text, finish_reason, stop_reason)"""
    for token in tokens:
        request.append_token(token)
        if request.finish_reason:
            break
    request.status = RequestStatus.FINISHED
    completion = request.output().outputs[0]
    assert completion.token_ids == list(tokens[: len(completion.token_ids)])
    return len(completion.token_ids), completion.text, completion.finish_reason, completion.stop_reason


def test_the_block_table_is_made_anew_for_other_blocks_only() -> None:
    request = make_request()
    assert request.block_table().tolist() == []
    request.block_ids += [4, 7]
    first = request.block_table()
    assert first.tolist() == [4, 7]
    assert request.block_table() is first
    request.block_ids += [5]
    assert request.block_table().tolist() == [4, 7, 5]
    assert first.tolist() == [4, 7]
    request.block_ids = [9, 8, 7]  # as many others
    assert request.block_table().tolist() == [9, 8, 7]


def test_ends_at_max_tokens() -> None:
    assert feed(make_request(max_tokens=3), b"abcdef") == (3, "abc", "length", None)


def test_ends_at_the_models_end_token_which_is_not_text() -> None:
    assert feed(make_request(), b"ab\0cd") == (3, "ab", "stop", None)


def test_ignore_eos_goes_on() -> None:
    assert feed(make_request(max_tokens=4, ignore_eos=True), b"ab\0cd") == (4, "ab\0c", "length", None)


def test_ends_at_a_stop_token_which_is_named_and_not_text() -> None:
    assert feed(make_request(stop_token_ids=[ord("c")]), b"abcd") == (3, "ab", "stop", ord("c"))


def test_a_stop_token_works_even_when_eos_is_ignored() -> None:
    assert feed(make_request(ignore_eos=True, stop_token_ids=[EOS]), b"ab\0cd") == (3, "ab", "stop", EOS)


def test_ends_at_a_stop_string_that_spans_tokens() -> None:
    assert feed(make_request(stop=["lo w", "zzz"]), b"hello world") == (7, "hel", "stop", "lo w")


def test_a_stop_string_wins_over_max_tokens_in_the_same_step() -> None:
    assert feed(make_request(max_tokens=2, stop="ab"), b"abc") == (2, "", "stop", "ab")


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    assert feed(make_request(max_tokens=2, prompt="stop", stop="op!"), b"!a") == (2, "!a", "length", None)


def test_a_stop_string_of_wide_characters() -> None:
    assert feed(make_request(stop="é😀"), "aé😀b".encode()) == (7, "a", "stop", "é😀")


def test_end_token_with_stop_strings_set() -> None:
    assert feed(make_request(stop="zz"), b"az\0") == (3, "az", "stop", None)


def test_an_unfinished_character_at_the_end_shows_as_a_replacement() -> None:
    for stop in (None, "zz"):
        assert feed(make_request(max_tokens=2, stop=stop), "a😀".encode())[1] == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("computed", "count", "expected"), [(0, 2, "he"), (3, 2, "lo"), (3, 4, "loAB"), (5, 1, "A")])
def test_pending_tokens_run_from_prompt_into_answer(computed: int, count: int, expected: str) -> None:
    request = make_request(prompt="hello")
    request.output_token_ids = list(b"AB")
    request.num_computed_tokens = computed
    assert bytes(request.pending_token_ids(count)).decode() == expected


def test_output_of_a_running_request_is_an_error() -> None:
    with pytest.raises(AssertionError, match="is waiting"):
        make_request().output()


def test_without_a_tokenizer_there_is_no_text() -> None:
    request = make_request(max_tokens=2)
    request.detokenizer = None
    assert feed(request, b"ab") == (2, "", "length", None)
