"""What the user may set (EngineConfig), and how the open choices are settled (resolve).

The command line reads the options from here, so this module loads torch only when it looks at the hardware.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SAMPLE = "sample:"
DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
FUSIONS = ("none", "inductor")
_BACKENDS = (
    "breakable, full, auto (full graphs up to the size where they are faster), eager, debug_eager, tc_piecewise or "
    "tc_piecewise_inductor"
)

# On a CPU every bucket is captured and replayed by emulation: what is small there starts in seconds.
_MAX_MODEL_LEN = {"cuda": 8192, "cpu": 1024}
_MAX_NUM_BATCHED_TOKENS = {"cuda": 2048, "cpu": 128}
_MAX_NUM_SEQS = {"cuda": 64, "cpu": 8}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine, with vLLM's names where vLLM has them. None and "auto" are settled by `resolve`.

    Raises ConfigError for a value that can never be used, naming the option, what is allowed and what came.
    """

    model: str = field(metadata={"help": "model folder, preset name, or smollm2"})
    dtype: str = field(
        default="auto", metadata={"help": f"auto (the model's own, float32 on a CPU) or one of {', '.join(DTYPES)}"}
    )
    load_format: str = field(default="auto", metadata={"help": "auto, or dummy for random weights and no tokenizer"})
    max_model_len: int | None = field(default=None, metadata={"help": "longest prompt and answer together, in tokens"})
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata={"help": "tokens of one step: the chunk size of long prompts, and the largest prefill bucket"},
    )
    max_num_seqs: int | None = field(
        default=None, metadata={"help": "requests that run at the same time, and the largest decode bucket"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens in one KV block"})
    num_gpu_blocks_override: int | None = field(
        default=None, metadata={"help": "KV blocks, instead of as many as fit; one of them is reserved for padding"}
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "keep the KV of finished requests for prompts that begin with the same tokens"}
    )
    gpu_memory_utilization: float = field(default=0.9, metadata={"help": "share of the GPU's memory that may be used"})
    prefill_backend: str = field(default="breakable", metadata={"help": f"how steps with a prompt run: {_BACKENDS}"})
    decode_backend: str = field(default="full", metadata={"help": f"how steps without a prompt run: {_BACKENDS}"})
    prefill_request_slots: int | None = field(
        default=None,
        metadata={"help": "requests that fit in a full prefill graph, instead of max_num_seqs; more run eagerly"},
    )
    attention: str = field(default="auto", metadata={"help": "auto, sdpa, flash, triton or flashinfer"})
    fusion: str = field(
        default="none",
        metadata={"help": "inductor: compile the layers before they are captured, for fewer kernels; or none"},
    )
    device: str = field(default="auto", metadata={"help": "auto, cuda, cuda:N, or cpu (emulated, not fast)"})
    seed: int = field(default=0, metadata={"help": "for dummy weights and for requests without a seed"})
    prefill_buckets: Sequence[int] | None = field(default=None, metadata={"help": "captured sizes, in tokens"})
    decode_buckets: Sequence[int] | None = field(default=None, metadata={"help": "captured sizes, in requests"})
    verify: str | None = field(
        default=None,
        metadata={"help": "startup: compare replays with eager before serving; sample:0.01: that share of the steps"},
    )
    cache_dir: str | Path | None = field(default=None, metadata={"help": "where converted models are kept"})

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a folder, a preset name or smollm2, got {self.model!r}")
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("fusion", self.fusion, FUSIONS)
        _check_int("block_size", self.block_size, 1)
        _check_int("seed", self.seed, 0)
        for name, low in _OPTIONAL_COUNTS.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}")
        for name in ("prefill_backend", "decode_backend", "attention", "device"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a name, got {getattr(self, name)!r}")
        utilization = self.gpu_memory_utilization
        if not isinstance(utilization, int | float) or isinstance(utilization, bool) or not 0 < utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be a number in (0, 1], got {utilization!r}")
        for name in ("prefill_buckets", "decode_buckets"):
            object.__setattr__(self, name, _as_buckets(name, getattr(self, name)))
        _check_verify(self.verify)
        if self.max_num_batched_tokens is not None and self.max_num_seqs is not None:
            self._check_budget(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def verify_fraction(self) -> float:
        """The share of the served steps that is compared with eager."""
        return float(self.verify.removeprefix(_SAMPLE)) if self.verify and self.verify.startswith(_SAMPLE) else 0.0

    @property
    def sizes(self) -> StepSizes:
        """The sizes of a config that `resolve` has settled."""
        max_model_len, tokens, seqs = self.max_model_len, self.max_num_batched_tokens, self.max_num_seqs
        assert max_model_len is not None and tokens is not None and seqs is not None, "call resolve() first"  # noqa: PT018
        return StepSizes(max_model_len, tokens, seqs)

    @staticmethod
    def _check_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} must be at least max_num_seqs={max_num_seqs}, as "
                "each running request decodes one token a step; raise the first or lower the second"
            )


@dataclass(frozen=True)
class StepSizes:
    """What one request and one step can have at most."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


_OPTIONAL_COUNTS = {
    "max_model_len": 2,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 2,
    "prefill_request_slots": 1,
}


@dataclass(frozen=True)
class Hardware:
    """The device that the engine runs on."""

    device: torch.device

    @classmethod
    def detect(cls, device: str) -> Hardware:
        """Raises ConfigError when the named device is not there."""
        import torch

        has_cuda = torch.cuda.is_available()
        if device == "auto":
            device = "cuda" if has_cuda else "cpu"
        try:
            parsed = torch.device(device)
        except RuntimeError:
            parsed = torch.device("meta")
        if parsed.type not in ("cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
        if parsed.type == "cuda":
            if not has_cuda:
                raise ConfigError(f"device={device!r}, but torch sees no CUDA device; use device='cpu' (emulated)")
            parsed = torch.device("cuda", torch.cuda.current_device() if parsed.index is None else parsed.index)
            if parsed.index >= torch.cuda.device_count():
                raise ConfigError(f"device={device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
        return cls(parsed)


@dataclass(frozen=True)
class ModelLimits:
    """What the model's configuration says before any weight is read."""

    max_position: int
    dtype: str | None
    """Of the checkpoint; None when it does not say."""


def resolve(config: EngineConfig, hardware: Hardware, limits: ModelLimits) -> EngineConfig:
    """A new config without "auto" or None among the sizes; each choice is logged with its reason.

    Raises ConfigError for a max_model_len beyond the model's, and for sizes that don't fit each other.
    """
    device_type = hardware.device.type
    choices = [_choose_device(config, hardware)]
    if config.dtype == "auto":
        choices.append(_choose_dtype(limits, device_type))
    if config.max_model_len is None:
        choices.append(_choose_max_model_len(limits, device_type))
    elif config.max_model_len > limits.max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is beyond the {limits.max_position} positions of {config.model}; "
            f"use max_model_len={limits.max_position} or less"
        )
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = _MAX_NUM_SEQS[device_type] if tokens is None else min(_MAX_NUM_SEQS[device_type], tokens)
        choices.append(_Choice("max_num_seqs", seqs, f"the default on {device_type}"))
    if tokens is None:
        tokens = max(_MAX_NUM_BATCHED_TOKENS[device_type], seqs)
        choices.append(_Choice("max_num_batched_tokens", tokens, f"the default on {device_type}"))
    if config.prefill_request_slots is not None and config.prefill_request_slots > seqs:
        raise ConfigError(
            f"prefill_request_slots={config.prefill_request_slots} is more than max_num_seqs={seqs}, and a step has no "
            "more requests than that; lower the first or raise the second"
        )
    for choice in choices:
        logger.info("%s=%s: %s", choice.name, choice.value, choice.reason)
    return dataclasses.replace(config, **{choice.name: choice.value for choice in choices})  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Choice:
    name: str
    value: object
    reason: str


def _choose_device(config: EngineConfig, hardware: Hardware) -> _Choice:
    if config.device != "auto":
        reason = "as asked"
    else:
        reason = "torch sees no CUDA device" if hardware.device.type == "cpu" else "torch sees one"
    return _Choice("device", str(hardware.device), reason)


def _choose_dtype(limits: ModelLimits, device_type: str) -> _Choice:
    if device_type == "cpu":
        return _Choice("dtype", "float32", f"most CPUs are slow in half precision (the model's own is {limits.dtype})")
    if limits.dtype in DTYPES:
        return _Choice("dtype", limits.dtype, "the model's own")
    return _Choice("dtype", "bfloat16", f"the model's configuration says {limits.dtype}")


def _choose_max_model_len(limits: ModelLimits, device_type: str) -> _Choice:
    default = _MAX_MODEL_LEN[device_type]
    if limits.max_position <= default:
        return _Choice("max_model_len", limits.max_position, "the model's maximum")
    reason = f"the default on {device_type}; the model allows {limits.max_position}"
    return _Choice("max_model_len", default, reason)


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_verify(value: object) -> None:
    if value is None or value == "startup":
        return
    share = value.removeprefix(_SAMPLE) if isinstance(value, str) and value.startswith(_SAMPLE) else ""
    try:
        is_share = 0 < float(share) <= 1
    except ValueError:
        is_share = False
    if not is_share:
        raise ConfigError(f"verify must be startup or {_SAMPLE} and a share in (0, 1], as {_SAMPLE}0.01, got {value!r}")


def _check_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be an integer >= {low}, got {value!r}")


def _as_buckets(name: str, value: object) -> tuple[int, ...] | None:
    """A tuple, so that the config stays immutable; order and top are the ladder's business."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be a list of sizes, got {value!r}")
    for size in value:
        _check_int(f"each of {name}", size, 1)
    return tuple(value)
