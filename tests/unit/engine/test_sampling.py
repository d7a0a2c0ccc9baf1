import math

import pytest

from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import ConfigError


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.ignore_eos, params.seed) == (16, False, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.n, params.logprobs, params.has_penalties) == (1, None, False)
    assert params.stop_strings == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),
        ("temperature", 10**50),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1000.0),
        ("n", 0),
        ("n", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", 1.0),
        ("seed", 1.0),
        ("seed", 2**63),
        ("ignore_eos", "yes"),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", "12"),
    ],
)
def test_value_out_of_range_is_refused_with_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


def test_range_in_the_message_says_which_end_is_open() -> None:
    with pytest.raises(ConfigError, match=r"top_p must be a number in \(0, 1\], got 0"):
        SamplingParams(top_p=0)
    with pytest.raises(ConfigError, match=r"temperature must be a number in \[0, 1e\+38\], got -1"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_stop_takes_one_string_or_many() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_params_do_not_change_with_the_callers_list() -> None:
    stop, ids = ["a"], [5]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(6)
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (5,)
