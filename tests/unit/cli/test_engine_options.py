from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import breakgraph
from breakgraph.cli.engine_options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    int_list,
    sampling_params,
)
from breakgraph.engine.config import EngineConfig
from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import ConfigError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_sampling_options(parser)
    add_engine_options(parser)
    return parser.parse_args(argv)


def test_without_flags_the_defaults_are_the_dataclasses() -> None:
    args = parse()
    assert EngineConfig(**engine_options(args)) == EngineConfig(model="smollm2")
    assert sampling_params(args) == SamplingParams()


GIVEN = {
    "model": ("folder", "folder"),
    "dtype": ("float16", "float16"),
    "load_format": ("dummy", "dummy"),
    "max_model_len": ("99", 99),
    "max_num_batched_tokens": ("77", 77),
    "max_num_seqs": ("5", 5),
    "block_size": ("8", 8),
    "num_gpu_blocks_override": ("12", 12),
    "gpu_memory_utilization": ("0.5", 0.5),
    "prefill_backend": ("eager", "eager"),
    "decode_backend": ("breakable", "breakable"),
    "attention": ("sdpa", "sdpa"),
    "fusion": ("inductor", "inductor"),
    "device": ("cpu", "cpu"),
    "seed": ("3", 3),
    "prefill_request_slots": ("3", 3),
    "prefill_buckets": ("8,16", (8, 16)),
    "decode_buckets": ("1,2", (1, 2)),
    "verify": ("sample:0.5", "sample:0.5"),
    "cache_dir": ("/somewhere", "/somewhere"),
    "enable_prefix_caching": (None, False),
}
"""What is typed after the flag, and its value; None is the flag with "no"."""


def test_every_engine_option_has_a_flag_of_its_name() -> None:
    assert GIVEN.keys() == {field.name for field in dataclasses.fields(EngineConfig)}
    argv: list[str] = []
    for name, (text, _) in GIVEN.items():
        flag = name.replace("_", "-")
        argv += [f"--no-{flag}"] if text is None else [f"--{flag}", text]
    assert engine_options(parse(*argv)) == {name: value for name, (_, value) in GIVEN.items()}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--top-k", "5"], "top_k", 5),
        (["--min-p", "0.1"], "min_p", 0.1),
        (["--max-tokens", "7"], "max_tokens", 7),
        (["--stop", "a", "--stop", "b,c"], "stop", ("a", "b,c")),
        (["--stop-token-ids", "1,2"], "stop_token_ids", (1, 2)),
        (["--ignore-eos"], "ignore_eos", True),
        (["--seed", "9"], "seed", 9),
        (["--n", "3"], "n", 3),
        (["--logprobs", "2"], "logprobs", 2),
        (["--presence-penalty", "-1.5"], "presence_penalty", -1.5),
        (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
        (["--repetition-penalty", "1.2"], "repetition_penalty", 1.2),
    ],
)
def test_every_sampling_option_has_a_flag_of_its_name(argv: list[str], name: str, value: Any) -> None:
    assert sampling_params(parse(*argv)) == SamplingParams(**{name: value})


def test_no_sampling_option_is_without_a_flag() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names - vars(parse()).keys() == {"guided_decoding"}


def test_a_value_out_of_range_is_the_dataclasses_error() -> None:
    with pytest.raises(ConfigError, match="temperature must be"):
        sampling_params(parse("--temperature", "-1"))


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5"])
def test_malformed_lists_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="integers with commas"):
        int_list(text)


def test_the_cache_folder_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKGRAPH_CACHE", "/from/env")
    assert engine_options(parse())["cache_dir"] == "/from/env"
    assert engine_options(parse("--cache-dir", "/from/flag"))["cache_dir"] == "/from/flag"


def test_making_the_flags_loads_no_torch() -> None:
    code = "import sys; from breakgraph.cli.main import build_parser; build_parser(); print('torch' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(Path(breakgraph.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == "False\n"
