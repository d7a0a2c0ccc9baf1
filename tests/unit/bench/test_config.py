from __future__ import annotations

from typing import Any

import pytest

from breakgraph.bench.config import (
    BenchConfig,
    CaptureBench,
    DecodeBench,
    PrefillBench,
    ServeBench,
)
from breakgraph.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (PrefillBench, {"backends": ("fast",)}, "unknown backends 'fast'; known: auto, breakable"),
        (PrefillBench, {"fusion": ("inductr",)}, "unknown fusion 'inductr'; known: inductor, none"),
        (PrefillBench, {"attention": ("none",)}, "unknown attention 'none'"),
        (PrefillBench, {"backends": ()}, "backends: expected a list with one or more of"),
        (PrefillBench, {"backends": "eager"}, "backends: expected a list with one or more of"),
        (PrefillBench, {"backends": ("full", "full")}, "backends: expected each value once, got full, full"),
        (ServeBench, {"peers": ("torch.compile",)}, "unknown peers 'torch.compile'; known: all, none, transformers"),
        (PrefillBench, {"peers": ("all", "vllm")}, "peers: 'all' and 'none' stand alone, got all, vllm"),
        (DecodeBench, {"peers": ("vllm",)}, "unknown peers 'vllm'; known: all, none"),
        (PrefillBench, {"tokens": (0, 8)}, "tokens: expected integers of 1 or more, got (0, 8)"),
        (PrefillBench, {"tokens": ()}, "tokens: expected integers of 1 or more, got ()"),
        (PrefillBench, {"tokens": ("8",)}, "tokens: expected integers of 1 or more, got ('8',)"),
        (PrefillBench, {"tokens": (8, 8)}, "tokens: expected each value once, got (8, 8)"),
        (PrefillBench, {"tokens": (8, 64), "requests": (16,)}, "requests: expected at most 8"),
        (DecodeBench, {"batch": (True,)}, "batch: expected integers of 1 or more, got (True,)"),
        (DecodeBench, {"rounds": 0}, "rounds: expected integers of 1 or more, got 0"),
        (DecodeBench, {"seed": -1}, "seed: expected integers of 0 or more, got -1"),
        (ServeBench, {"num_requests": None}, "num_requests: expected integers of 1 or more, got None"),
        (ServeBench, {"max_num_batched_tokens": 64}, "max_num_batched_tokens=64 must be at least the 256 requests"),
        (CaptureBench, {"prefill_buckets": (4, -1)}, "prefill_buckets: expected integers of 1 or more"),
        (CaptureBench, {"compare": True, "rounds": 3}, "leave rounds out with it"),
        (CaptureBench, {"compare": True, "backends": ("full",)}, "leave backends out with it"),
        (CaptureBench, {"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        (CaptureBench, {"model": ""}, "model must be a preset name or a folder, got ''"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    config: type[BenchConfig], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**options)
    assert said in str(refused.value)


def test_unknown_names_are_of_their_own_kind() -> None:
    with pytest.raises(UnknownNameError):
        PrefillBench(backends=("fast",))


def test_peers_by_name_all_and_none() -> None:
    assert PrefillBench().chosen_peers == ("torch.compile", "transformers", "vllm")
    assert ServeBench(peers=("vllm",)).chosen_peers == ("vllm",)
    assert ServeBench(peers=("none",)).chosen_peers == ()
    assert DecodeBench().chosen_peers == ()


def test_requests_run_at_the_same_time_up_to_a_limit() -> None:
    assert ServeBench().seqs == 256
    assert ServeBench(max_num_seqs=300).seqs == 256
    assert ServeBench(max_num_seqs=100, max_num_batched_tokens=100).seqs == 100


