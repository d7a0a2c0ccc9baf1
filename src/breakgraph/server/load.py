"""Load for a server: what is sent, when, and what the traces of its clients come to."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from breakgraph.errors import ConfigError, UnknownNameError

# fmt: off
_WORDS = (
    "the", "a", "of", "in", "to", "and", "is", "was", "for", "on", "with", "as", "by", "at", "from", "that", "this",
    "water", "light", "house", "river", "people", "year", "day", "child", "world", "school", "city", "country", "group",
    "problem", "fact", "hand", "place", "week", "company", "system", "work", "night", "point", "home", "room", "area",
    "money", "story", "month", "study", "book", "word", "issue", "side",
)
# fmt: on


@dataclass(frozen=True)
class LengthMix:
    """Mean lengths of prompts and answers, in tokens."""

    prompt: float
    answer: float


MIXES = {"alpaca": LengthMix(19.31, 58.45), "sharegpt": LengthMix(161.31, 337.99)}
"""Means of two data sets as Kwon et al. 2023 ("Efficient Memory Management for Large Language Model Serving with
PagedAttention", figure 11) give them for OPT's tokenizer. Their spread is not from there: that is `prompt_spread`."""

_SHARED_PREFIXES = 4
_SHARED_WORDS = 200


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent. Raises ConfigError for a value that cannot be used."""

    url: str = field(default="http://127.0.0.1:8000", metadata={"help": "address of the server, without /v1"})
    num_requests: int = field(default=100, metadata={"help": "requests in all"})
    rate: float = field(
        default=4.0, metadata={"help": "requests a second on average, with Poisson arrivals; 0 sends all at once"}
    )
    mix: str | None = field(
        default=None,
        metadata={
            "help": "lengths as in a data set, alpaca or sharegpt, of prompts and of answers, which then end nowhere "
            "else; instead of --prompt-words"
        },
    )
    prompt_words: int = field(default=60, metadata={"help": "median length of the prompts, in words"})
    prompt_spread: float = field(
        default=1.0, metadata={"help": "standard deviation of the logarithm of that length; 0 makes all alike"}
    )
    shared: float = field(
        default=0.25, metadata={"help": f"share of prompts that begin with one of {_SHARED_PREFIXES} long texts"}
    )
    max_tokens: int = field(default=64, metadata={"help": "tokens of each answer at most"})
    seed: int = field(default=0, metadata={"help": "of prompts and arrivals"})

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_words", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer >= 1, got {getattr(self, name)}")
        for name, high in (("rate", math.inf), ("prompt_spread", 3.0), ("shared", 1.0)):
            value = getattr(self, name)
            if not (0 <= value <= high and math.isfinite(value)):
                raise ConfigError(f"{name} must be a number in [0, {high:g}], got {value}")
        if self.mix is not None and self.mix not in MIXES:
            raise UnknownNameError("mix", self.mix, MIXES)


@dataclass
class Trace:
    """One request as its client saw it. Times are seconds since the load began."""

    sent_at: float
    token_times: list[float] = field(default_factory=list)
    """Of each event that has text."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft_sec(self) -> float:
        """From sending to the first text."""
        return self.token_times[0] - self.sent_at

    @property
    def tpot_sec(self) -> float:
        """Of each token after the first, on average."""
        return (self.token_times[-1] - self.token_times[0]) / (self.num_tokens - 1)

    @property
    def gaps_sec(self) -> list[float]:
        """From one text to the next."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


def log_mean(mean: float, spread: float) -> float:
    """Of the logarithms of a log-normal distribution with this mean."""
    return math.log(mean) - spread**2 / 2


def answer_lengths(load: Load) -> list[int]:
    """Tokens of each answer: log-normal with the mix's mean, `max_tokens` at most; without a mix `max_tokens`."""
    if load.mix is None:
        return [load.max_tokens] * load.num_requests
    rng, mu = random.Random(f"answers {load.seed}"), log_mean(MIXES[load.mix].answer, load.prompt_spread)
    drawn = (round(rng.lognormvariate(mu, load.prompt_spread)) for _ in range(load.num_requests))
    return [min(max(1, length), load.max_tokens) for length in drawn]


def make_prompts(load: Load) -> list[str]:
    """Log-normal lengths, as those of prompts that people write; the same for the same seed."""
    median = math.log(load.prompt_words)
    if load.mix is not None:
        median = log_mean(MIXES[load.mix].prompt, load.prompt_spread)  # the words are one token each
    rng = random.Random(f"prompts {load.seed}")
    prefixes = [" ".join(rng.choices(_WORDS, k=_SHARED_WORDS)) for _ in range(_SHARED_PREFIXES)]
    prompts = []
    for _ in range(load.num_requests):
        num_words = max(1, round(rng.lognormvariate(median, load.prompt_spread)))
        words = " ".join(rng.choices(_WORDS, k=num_words))
        prompts.append(f"{rng.choice(prefixes)} {words}" if rng.random() < load.shared else words)
    return prompts


def arrival_times(load: Load) -> list[float]:
    """Seconds from the beginning, in order: a Poisson process of `rate`, or all zero."""
    if load.rate == 0:
        return [0.0] * load.num_requests
    rng, now, times = random.Random(f"arrivals {load.seed}"), 0.0, []
    for _ in range(load.num_requests):
        times.append(now)
        now += rng.expovariate(load.rate)
    return times


def summary(traces: Sequence[Trace], took_sec: float) -> dict[str, Any]:
    """Counts, and percentiles in milliseconds. Requests that failed are counted by reason and in nothing else."""
    good = [trace for trace in traces if trace.error is None and trace.token_times]
    times = {
        "ttft_ms": [trace.ttft_sec for trace in good],
        "tpot_ms": [trace.tpot_sec for trace in good if trace.num_tokens > 1],
        "itl_ms": [gap for trace in good for gap in trace.gaps_sec],
    }
    num_tokens = sum(trace.num_tokens for trace in good)
    return {
        "num_answered": len(good),
        "num_failed_by_reason": dict(Counter(trace.error or "no text" for trace in traces if trace not in good)),
        "num_prompt_tokens": sum(trace.num_prompt_tokens for trace in good),
        "num_generated_tokens": num_tokens,
        "took_sec": took_sec,
        "requests_per_sec": len(good) / took_sec,
        "generated_tokens_per_sec": num_tokens / took_sec,
        **{name: percentiles(values) for name, values in times.items()},
    }


def percentiles(values_sec: Sequence[float]) -> dict[str, float] | None:
    """p50 and p99 by nearest rank, in milliseconds; None without values."""
    if not values_sec:
        return None
    ranked = sorted(values_sec)
    return {f"p{share}": ranked[math.ceil(share / 100 * len(ranked)) - 1] * 1e3 for share in (50, 99)}


def graph_use(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Steps between two looks at /v1/graphs, by phase; `hit_rate` is the share of them that were replays.

    Of all replicas, with all steps of those that are new.
    """
    names = {engine.get("replica") for engine in _engines(after)}
    counts = {phase: [0, 0] for phase in _step_counts(after, names)}
    for sign, state in ((1, after), (-1, before)):
        for phase, (num_replays, num_eager) in _step_counts(state, names).items():
            counts[phase][0] += sign * num_replays
            counts[phase][1] += sign * num_eager
    return {
        phase: {
            "num_replays": num_replays,
            "num_eager_steps": num_eager,
            "hit_rate": num_replays / (num_replays + num_eager) if num_replays + num_eager else None,
        }
        for phase, (num_replays, num_eager) in counts.items()
    }


def _engines(state: dict[str, Any]) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = state.get("replicas", [state])
    return replicas


def _step_counts(state: dict[str, Any], names: set[str | None]) -> dict[str, tuple[int, int]]:
    """Replays and eager steps by phase, of the engines of those names."""
    counts: dict[str, tuple[int, int]] = {}
    for engine in _engines(state):
        if engine.get("replica") in names:
            for phase in engine["phases"]:
                num_replays, num_eager = counts.get(phase["phase"], (0, 0))
                counts[phase["phase"]] = (num_replays + phase["num_replays"], num_eager + phase["num_eager_steps"])
    return counts
