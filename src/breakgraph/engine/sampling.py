"""What a caller may ask of one request: the names and ranges of vLLM's SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from breakgraph.engine.guided_params import GuidedDecodingParams
from breakgraph.errors import ConfigError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 logits divided by less overflow."""

MAX_TEMPERATURE = 1e38
"""Beyond it float32 has infinity."""

MAX_LOGPROBS = 20
"""Alternatives a token, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Raises ConfigError for a value out of range, naming the field, the range and the value.
    """

    temperature: float = field(default=1.0, metadata={"help": "0 is greedy; higher is more random"})
    top_p: float = field(default=1.0, metadata={"help": "keep the likeliest tokens up to this probability mass"})
    top_k: int = field(default=0, metadata={"help": "keep the k likeliest tokens; 0 or -1 keeps all"})
    min_p: float = field(default=0.0, metadata={"help": "drop tokens below this share of the likeliest one's"})
    presence_penalty: float = field(
        default=0.0, metadata={"help": "taken off the logits of tokens that the answer has, in [-2, 2]"}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "taken off the logit of a token for each time the answer has it, in [-2, 2]"}
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata={"help": "divides positive logits of tokens in prompt or answer, multiplies negative ones"},
    )
    n: int = field(default=1, metadata={"help": "answers to each prompt"})
    logprobs: int | None = field(
        default=None,
        metadata={"help": f"log probabilities of each token and of so many of the likeliest, {MAX_LOGPROBS} at most"},
    )
    prompt_logprobs: int | None = field(
        default=None,
        metadata={
            "help": "log probabilities of the prompt's tokens in the same way; it is then computed token by token"
        },
    )
    max_tokens: int = field(default=16, metadata={"help": "new tokens at most"})
    stop: str | Sequence[str] | None = field(default=None, metadata={"help": "strings that end the text, not included"})
    stop_token_ids: Sequence[int] | None = field(default=None, metadata={"help": "tokens that end the request"})
    ignore_eos: bool = field(default=False, metadata={"help": "go on after the model's end-of-sequence token"})
    seed: int | None = field(default=None, metadata={"help": "same tokens on every run, whatever else is in the batch"})
    guided_decoding: GuidedDecodingParams | None = field(
        default=None, metadata={"help": "the form that the answer must have, as far as max_tokens lets it go"}
    )

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Further out, float32 logits could overflow.
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_int("n", self.n, 1, "an integer >= 1")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, 0, f"an integer from 0 to {MAX_LOGPROBS}", high=MAX_LOGPROBS)
        _check_int("top_k", self.top_k, -1, "an integer >= 1, or 0 or -1 to keep all tokens")
        _check_int("max_tokens", self.max_tokens, 1, "an integer >= 1")
        if self.seed is not None:
            _check_int("seed", self.seed, None, "an integer")
            if not -(2**63) <= self.seed < 2**63:
                raise ConfigError(f"seed must fit 64 bits, got {self.seed}")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if not isinstance(self.guided_decoding, GuidedDecodingParams | None):
            raise ConfigError(f"guided_decoding must be GuidedDecodingParams, got {self.guided_decoding!r}")
        if self.guided_decoding is not None and self.ignore_eos:
            raise ConfigError("ignore_eos goes on where a guided answer is complete; leave out one of them")
        object.__setattr__(self, "stop", _as_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int | None, expected: str, *, high: int | None = None) -> None:
    in_range = _is_int(value) and (low is None or value >= low) and (high is None or value <= high)  # type: ignore[operator]
    if not in_range:
        raise ConfigError(f"{name} must be {expected}, got {value!r}")


def _check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    in_range = is_number and low <= value <= high  # type: ignore[operator]
    if not in_range or (low_open and value == low):
        limits = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise ConfigError(f"{name} must be a number in {limits}, got {value!r:.100}")


def _as_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,)
    for item in strings:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"stop must be a non-empty string or a list of them, got {value!r}")
    return strings


def _as_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(_is_int(v) and v >= 0 for v in value):
        raise ConfigError(f"stop_token_ids must be a list of token ids >= 0, got {value!r}")
    return tuple(value)
