import dataclasses
import logging

import pytest
import torch

from breakgraph import LLM
from breakgraph.engine.config import EngineConfig, Hardware, ModelLimits, resolve
from breakgraph.errors import ConfigError, UnknownNameError

CPU = Hardware(torch.device("cpu"))
CUDA = Hardware(torch.device("cuda", 0))
LIMITS = ModelLimits(max_position=8192, dtype="bfloat16")


def make(**options: object) -> EngineConfig:
    return EngineConfig(**{"model": "m", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", None),
        ("dtype", "int8"),
        ("load_format", "gguf2"),
        ("block_size", 0),
        ("max_model_len", 1),
        ("max_model_len", 2.0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("num_gpu_blocks_override", 1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", "0.9"),
        ("seed", -1),
        ("enable_prefix_caching", 1),
        ("prefill_backend", None),
        ("prefill_buckets", []),
        ("prefill_buckets", "16"),
        ("decode_buckets", [0, 4]),
        ("decode_buckets", [1.5]),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        make(**{name: value})


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        make(max_seqs=3)


def test_config_is_frozen_and_copies_bucket_lists() -> None:
    buckets = [8, 16]
    config = make(prefill_buckets=buckets)
    buckets.append(32)
    assert config.prefill_buckets == (8, 16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_a_step_must_have_room_for_every_running_request() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=8 must be at least max_num_seqs=9"):
        make(max_num_batched_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize(
    ("hardware", "dtype", "sizes"), [(CPU, "float32", (128, 8, 1024)), (CUDA, "bfloat16", (2048, 64, 8192))]
)
def test_resolve_settles_every_open_choice(hardware: Hardware, dtype: str, sizes: tuple[int, int, int]) -> None:
    config = make()
    resolved = resolve(config, hardware, LIMITS)
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs, resolved.max_model_len) == sizes
    assert (resolved.dtype, resolved.device) == (dtype, str(hardware.device))
    assert config == make()


def test_resolve_keeps_what_the_user_chose() -> None:
    options = {
        "dtype": "float32",
        "max_model_len": 100,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 5,
        "device": "cpu",
    }
    resolved = resolve(make(**options), CPU, LIMITS)
    assert {name: getattr(resolved, name) for name in options} == options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_num_seqs": 500}, (500, 500)),
        ({"max_num_batched_tokens": 3}, (3, 3)),
        ({"max_num_batched_tokens": 100}, (100, 8)),
    ],
)
def test_defaults_give_way_to_the_size_that_was_set(given: dict[str, int], expected: tuple[int, int]) -> None:
    resolved = resolve(make(**given), CPU, LIMITS)
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs) == expected


def test_each_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="breakgraph"):
        resolve(make(), CPU, LIMITS)
    length = "max_model_len=1024: the default on cpu; the model allows 8192"
    for line in ("dtype=float32: most CPUs", "max_num_seqs=8: ", length):
        assert line in caplog.text


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len=9000 is beyond the 8192 positions of m; use max_model_len=8192"
    ):
        resolve(make(max_model_len=9000), CPU, LIMITS)


@pytest.mark.parametrize(("hardware", "dtype"), [(CPU, "float32"), (CUDA, "bfloat16")])
def test_a_model_that_does_not_say_its_dtype(hardware: Hardware, dtype: str) -> None:
    assert resolve(make(), hardware, ModelLimits(max_position=64, dtype=None)).dtype == dtype


@pytest.mark.parametrize("device", ["tpu", "meta", "xpu:99x"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda"):
        Hardware.detect(device)


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device; use device='cpu'"):
        Hardware.detect("cuda")
    assert Hardware.detect("auto").device.type == "cpu"


def test_an_unknown_llm_option_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"LLM option 'max_tokens_per_step'.*max_num_batched_tokens"):
        LLM("smollm2", max_tokens_per_step=3)
