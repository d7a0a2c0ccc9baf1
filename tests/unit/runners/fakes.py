"""What the runner tests share: batches, a forward whose logits show what it read, an attention that only records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from breakgraph.attention import AttentionStep, current_step
from breakgraph.backends import make_backend
from breakgraph.runners import DecodeRunner, PhaseSpec, PrefillRunner, Runner, StepBatch, decode_spec, prefill_spec
from breakgraph.runners.spec import last_rows
from unit.backends.fakes import FakeFamily

BLOCK_SIZE = 4
NUM_BLOCKS = 64
CACHE = {"max_model_len": 32, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}


def make_batch(requests: Sequence[tuple[int, int]], first_token: int = 1) -> StepBatch:
    """Requests as (cached tokens, new tokens), each on blocks of its own from block 1 on; token ids count upward."""
    blocks = iter(range(1, NUM_BLOCKS))
    tables = [[next(blocks) for _ in range(-(-(cached + new) // BLOCK_SIZE))] for cached, new in requests]
    spans = [range(cached, cached + new) for cached, new in requests]
    positions = [position for span in spans for position in span]
    return StepBatch(
        input_ids=range(first_token, first_token + len(positions)),
        positions=positions,
        slot_mapping=[
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for table, span in zip(tables, spans, strict=True)
            for position in span
        ],
        q_lens=[new for _, new in requests],
        seq_lens=[cached + new for cached, new in requests],
        block_tables=tables,
        logits_rows=last_rows([new for _, new in requests]),
    )


def decode_batch(num_reqs: int, first_token: int = 1) -> StepBatch:
    return make_batch([(3 + index % 7, 1) for index in range(num_reqs)], first_token)


def make_prefill_spec(**overrides: Any) -> PhaseSpec:
    return prefill_spec(
        **{"max_num_batched_tokens": 16, "max_num_seqs": 4, "buckets": (4, 8, 16), **CACHE, **overrides}
    )


def make_decode_spec(**overrides: Any) -> PhaseSpec:
    return decode_spec(**{"max_num_seqs": 8, "buckets": (2, 4, 8), **CACHE, **overrides})


class FakeAttention:
    """Its metadata is the step itself."""

    name = "fake"

    def __init__(self, support: str = "decode") -> None:
        self.support = support
        self.steps: list[AttentionStep] = []
        self.tables: list[Tensor] = []
        """Copies: another bucket's load overwrites the static ones."""

    def graph_support(self, phase: str) -> str:
        return self.support

    def plan(self, step: AttentionStep) -> AttentionStep:
        self.steps.append(step)
        self.tables.append(step.block_tables_gpu.clone())
        return step


class FakeForward:
    """Logits rows are [token, position, slot]; keeps a copy of the fields and the step of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Tensor]] = []
        self.steps: list[Any] = []

    def __call__(self, fields: Mapping[str, Tensor]) -> Tensor:
        self.calls.append({name: value.clone() for name, value in fields.items()})
        self.steps.append(current_step())
        per_token = torch.stack([fields["input_ids"], fields["positions"], fields["slot_mapping"]], dim=1)
        return per_token[fields["logits_rows"]].float()


def expected_logits(batch: StepBatch) -> list[list[float]]:
    per_token = list(zip(batch.input_ids, batch.positions, batch.slot_mapping, strict=True))
    return [list(map(float, per_token[row])) for row in batch.logits_rows]


class Setup:
    """A runner on fakes, captured unless told otherwise, and the fakes around it."""

    def __init__(
        self,
        runner_class: type[Runner],
        spec: PhaseSpec,
        backend: str,
        support: str = "decode",
        family: FakeFamily | None = None,
    ) -> None:
        self.family = FakeFamily() if family is None else family
        self.attention = FakeAttention(support)
        self.forward = FakeForward()
        self.backend = make_backend(backend, self.family)
        self.runner = runner_class(spec, self.backend, self.forward, self.attention, "cpu")

    def ready(self) -> Setup:
        self.runner.allocate()
        self.runner.capture()
        self.forget()
        return self

    def forget(self) -> None:
        self.forward.calls.clear()
        self.forward.steps.clear()
        self.attention.steps.clear()
        self.family.events.clear()

    def poison(self) -> None:
        """Fill every static buffer with garbage."""
        largest = self.runner.spec.ladder[-1]
        for buffer in self.runner._buffers.views(largest).values():
            buffer.fill_(77)


def prefill_setup(backend: str = "breakable", **overrides: Any) -> Setup:
    return Setup(PrefillRunner, make_prefill_spec(**overrides), backend)


def decode_setup(backend: str = "full", **overrides: Any) -> Setup:
    return Setup(DecodeRunner, make_decode_spec(**overrides), backend)


SETUPS: dict[str, tuple[Callable[..., Setup], Callable[[int], StepBatch]]] = {
    "prefill": (prefill_setup, lambda size: make_batch([(5, size)])),
    "decode": (decode_setup, decode_batch),
}
"""By phase: its setup, and a batch that is as large as asked along the phase's axis."""
