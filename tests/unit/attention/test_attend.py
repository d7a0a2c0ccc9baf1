"""The marked call inside captures: it sees the step of this replay, and the cache of its own implementation."""

from __future__ import annotations

import torch

from breakgraph.attention import attend, use_step
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.graph import PlanFamily
from unit.attention.ragged import LAYERS, PLAIN, ragged_batch

LAYER = LAYERS["all at once"]


def test_a_replay_attends_for_its_own_step() -> None:
    attention = SdpaAttention([LAYER])
    captured = ragged_batch(LAYER, [5, 3], [0, 6], padding=4)
    q, k, v = captured.q, captured.k, captured.v

    def forward() -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], LAYER.v_head_dim)
        attend(q * 1.0, k * 1.0, v * 1.0, out, LAYER.layer_id)
        return out * 2.0

    with PlanFamily("cpu") as family:
        attention.bind(captured.kv)
        with use_step(attention.plan(captured.step)):
            plan = family.capture(forward)
        assert plan.num_breaks == 1
        for seed, (q_lens, cached) in enumerate([([12], [0]), ([1, 1, 1, 7], [20, 3, 9, 2]), ([2], [30])]):
            batch = ragged_batch(LAYER, q_lens, cached, padding=12 - sum(q_lens), seed=seed)
            for mine, new in zip((q, k, v), (batch.q, batch.k, batch.v), strict=True):
                mine.copy_(new)
            attention.bind(batch.kv)
            with use_step(attention.plan(batch.step)):
                family.poison()
                replayed = plan.replay().clone()
                assert torch.equal(replayed, forward())
            expected = batch.expected() * 2
            torch.testing.assert_close(replayed[: batch.live].double(), expected, rtol=0, atol=1e-4)
            assert replayed[batch.live :].eq(0).all()


def test_the_plain_call_fills_out_in_place() -> None:
    attention = SdpaAttention([PLAIN])
    batch = ragged_batch(PLAIN, [4], [2])
    attention.bind(batch.kv)
    out = torch.full_like(batch.q, torch.nan)
    with use_step(attention.plan(batch.step)):
        attend(batch.q, batch.k, batch.v, out, 0)
    torch.testing.assert_close(out.double(), batch.expected(), rtol=0, atol=1e-5)
