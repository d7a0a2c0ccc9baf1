"""An attention that chooses another for each step: what goes to the choice, also where that one chooses again."""

from __future__ import annotations

import torch

from breakgraph.attention import AttentionBackend, AttentionMetadata, AttentionStep, GraphSupport, LayerAttention
from breakgraph.attention.dispatching import DispatchingAttention
from breakgraph.attention.sdpa import SdpaAttention
from unit.attention.ragged import PLAIN, ragged_batch


class Pointing(DispatchingAttention):
    """Every step goes to `chosen`; counts its plans."""

    name = "pointing"

    def __init__(self, chosen: AttentionBackend, *others: AttentionBackend) -> None:
        super().__init__(chosen, *others)
        self.chosen, self.num_plans = chosen, 0

    def _choose(self, step: AttentionStep) -> AttentionBackend:
        return self.chosen

    def graph_support(self, phase: str) -> GraphSupport:
        return self.chosen.graph_support(phase)

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        self.num_plans += 1
        return super().plan(step)


class StoringAhead(SdpaAttention):
    """Says that it stores ahead of `forward`, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__([PLAIN])
        self.asked: list[str] = []

    def store(self, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention, metadata: AttentionMetadata) -> bool:
        self.asked.append("store")
        return True

    def forward(self, *args: object, **kwargs: object) -> None:
        self.asked.append(f"forward, stored: {args[-1]}")


def test_one_that_chooses_again_makes_its_own_plan() -> None:
    last, unused = SdpaAttention([PLAIN]), SdpaAttention([PLAIN])
    inner = Pointing(last, unused)
    outer = Pointing(inner)
    batch = ragged_batch(PLAIN, [3, 1], [3, 9])
    torch.testing.assert_close(batch.run(outer).double(), batch.expected(), rtol=0, atol=1e-5)
    assert inner.num_plans == 1
    assert outer.plan(batch.step).backend is outer.for_step(batch.step) is last
    assert all(attention.kv is batch.kv for attention in (outer, inner, last, unused))
    assert outer.layers == last.layers


def test_a_step_stays_with_the_one_that_planned_it() -> None:
    batch = ragged_batch(PLAIN, [3, 1], [3, 9])
    planner, other = StoringAhead(), StoringAhead()
    attention = Pointing(planner, other)
    metadata = attention.plan(batch.step)
    attention.chosen = other
    stored = attention.store(batch.k, batch.v, PLAIN, metadata)
    attention.forward(batch.q, batch.k, batch.v, PLAIN, metadata, torch.empty_like(batch.q), stored)
    assert planner.asked == ["store", "forward, stored: True"]
    assert not other.asked
