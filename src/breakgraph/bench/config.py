"""What a benchmark is asked for: one frozen dataclass a kind, from which the command line makes its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from breakgraph.engine.config import DTYPES, FUSIONS
from breakgraph.errors import ConfigError, UnknownNameError

ALL, NONE = "all", "none"


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What every kind takes. Raises ConfigError for a value that cannot be used, naming it and what is allowed."""

    kind: ClassVar[str]
    known_peers: ClassVar[tuple[str, ...]] = ()

    model: str = field(default="qwen3-0.6b", metadata={"help": "preset name or model folder; weights are random"})
    dtype: str = field(default="auto", metadata={"help": "auto (the model's own, float32 on a CPU) or a torch dtype"})
    device: str = field(default="auto", metadata={"help": "auto, cuda, cuda:N, or cpu (emulated: counts, no times)"})
    backends: Sequence[str] = field(
        default=("eager", "breakable", "full"), metadata={"help": "what is compared; a ratio to eager needs eager"}
    )
    fusion: Sequence[str] = field(default=("none",), metadata={"help": f"one or more of {', '.join(FUSIONS)}"})
    attention: Sequence[str] = field(
        default=("auto",), metadata={"help": "one or more of auto, sdpa, flash, triton and flashinfer"}
    )
    peers: Sequence[str] = field(
        default=(ALL,), metadata={"help": "what else to run, each in its own process: all, none, or names"}
    )
    rounds: int = field(default=50, metadata={"help": "timed rounds, in which the backends take turns"})
    seed: int = field(default=0, metadata={"help": "of weights and token ids"})

    def __post_init__(self) -> None:
        from breakgraph.attention.registry import ATTENTION_NAMES
        from breakgraph.backends import BACKENDS

        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a preset name or a folder, got {self.model!r}")
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {self.dtype!r}")
        for name, known in (("backends", BACKENDS), ("fusion", FUSIONS), ("attention", ATTENTION_NAMES)):
            _check_names(name, getattr(self, name), known)
        _check_names("peers", self.peers, (ALL, NONE, *self.known_peers))
        if len(self.peers) > 1 and {ALL, NONE} & set(self.peers):
            raise ConfigError(f"peers: {ALL!r} and {NONE!r} stand alone, got {', '.join(self.peers)}")
        for spec in dataclasses.fields(self):
            if "int" in str(spec.type):
                _check_numbers(spec, getattr(self, spec.name))

    @property
    def chosen_peers(self) -> tuple[str, ...]:
        """Their names."""
        if tuple(self.peers) == (NONE,):
            return ()
        return self.known_peers if tuple(self.peers) == (ALL,) else tuple(self.peers)


@dataclass(frozen=True, kw_only=True)
class PrefillBench(BenchConfig):
    """One forward over prompts: attention metadata, the model's body, logits of each request's last token."""

    kind = "prefill"
    known_peers = ("torch.compile", "transformers", "vllm")

    tokens: Sequence[int] = field(default=(128, 512, 2048, 8192), metadata={"help": "new tokens of a step, in all"})
    requests: Sequence[int] = field(default=(1, 4, 16), metadata={"help": "requests that share them evenly"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.requests) > min(self.tokens):
            raise ConfigError(
                f"requests: expected at most {min(self.tokens)}, the fewest tokens of a step, as each request has one "
                f"at least; got {max(self.requests)}"
            )


@dataclass(frozen=True, kw_only=True)
class DecodeBench(BenchConfig):
    """One forward over requests that have a single new token each."""

    kind = "decode"

    batch: Sequence[int] = field(default=(1, 32, 128), metadata={"help": "requests of a step"})
    context: Sequence[int] = field(default=(2000,), metadata={"help": "tokens of each request that are cached"})


@dataclass(frozen=True, kw_only=True)
class ServeBench(BenchConfig):
    """All requests at once, greedy. A backend is that of prompts; one that captures decodes in full graphs."""

    kind = "serve"
    known_peers = ("transformers", "vllm")

    num_requests: int = field(default=256, metadata={"help": "requests, all there from the start"})
    prompt_len: int = field(default=1000, metadata={"help": "tokens of each prompt, random"})
    answer_len: int = field(default=200, metadata={"help": "tokens of each answer"})
    max_num_seqs: int | None = field(default=None, metadata={"help": "requests that run at the same time (all)"})
    max_num_batched_tokens: int = field(default=8192, metadata={"help": "tokens of one step"})
    rounds: int = field(default=3, metadata={"help": "timed rounds, after one that is not"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least the {self.seqs} requests that "
                "run at the same time; raise it, or lower max_num_seqs"
            )

    @property
    def seqs(self) -> int:
        """Requests that run at the same time."""
        return min(self.num_requests, self.max_num_seqs or self.num_requests)


@dataclass(frozen=True, kw_only=True)
class CaptureBench(BenchConfig):
    """Building the ladder: time and memory of each bucket. A backend is that of prompts, as for `serve`."""

    kind = "capture"

    backends: Sequence[str] = field(default=("breakable", "full"), metadata={"help": "what is captured"})
    max_num_batched_tokens: int | None = field(default=None, metadata={"help": "the largest prefill bucket"})
    max_num_seqs: int | None = field(default=None, metadata={"help": "the largest decode bucket"})
    max_model_len: int | None = field(default=None, metadata={"help": "longest request, in tokens"})
    prefill_buckets: Sequence[int] | None = field(default=None, metadata={"help": "captured sizes, in tokens"})
    decode_buckets: Sequence[int] | None = field(default=None, metadata={"help": "captured sizes, in requests"})
    rounds: int = field(default=1, metadata={"help": "times that the ladder is built; the fastest is kept"})
    compare: bool = field(
        default=False,
        metadata={"help": "build and replay prefill buckets in every way there is, each once: build, memory, launches"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {"backends": ("breakable", "full"), "fusion": ("none",), "rounds": 1, "decode_buckets": None}
        for name, default in own.items():
            given = getattr(self, name)
            if self.compare and (tuple(given) if isinstance(given, Sequence) else given) != default:
                raise ConfigError(f"compare runs every backend and fusion once, on prefill; leave {name} out with it")


KINDS: dict[str, type[BenchConfig]] = {c.kind: c for c in (PrefillBench, DecodeBench, ServeBench, CaptureBench)}


def _check_names(name: str, values: object, known: Sequence[str]) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(f"{name}: expected a list with one or more of {', '.join(known)}, got {values!r}")
    for value in values:
        if value not in known:
            raise UnknownNameError(name, value, known)
    if len(set(values)) < len(values):
        raise ConfigError(f"{name}: expected each value once, got {', '.join(values)}")


def _check_numbers(spec: dataclasses.Field[Any], value: object) -> None:
    """Of what holds integers: one, or a list without repeats."""
    low = 0 if spec.name == "seed" else 1
    if value is None and "None" in str(spec.type):
        return
    values = list(value) if isinstance(value, Sequence) and "Sequence" in str(spec.type) else [value]
    if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < low for v in values):
        raise ConfigError(f"{spec.name}: expected integers of {low} or more, got {value!r}")
    if len(set(values)) < len(values):
        raise ConfigError(f"{spec.name}: expected each value once, got {value!r}")
