"""Steps of little work and of much: which implementation serves them, and that both are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from breakgraph.attention import AttentionMetadata, AttentionStep, GraphSupport, LayerAttention, RequestTensors, sized
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.attention.sized import SizedAttention
from unit.attention.ragged import PLAIN, ragged_batch


class Noting(SdpaAttention):
    """Counts its plans; `support` is what a prefill graph may hold."""

    def __init__(self, layers: Sequence[LayerAttention], support: GraphSupport = "varlen") -> None:
        super().__init__(layers)
        self.support, self.num_plans = support, 0

    def graph_support(self, phase: str) -> GraphSupport:
        return self.support

    def plan(self, step: AttentionStep) -> AttentionMetadata:
        self.num_plans += 1
        return super().plan(step)


def made(layers: Sequence[LayerAttention], long_support: GraphSupport = "varlen") -> SizedAttention:
    return SizedAttention(Noting(layers), Noting(layers, long_support))


def step_of(
    q_lens: Sequence[int], seq_lens: Sequence[int], *, bucket: int = 0, fixed_slots: bool = False
) -> AttentionStep:  # fmt: skip
    nothing = torch.zeros(0, dtype=torch.int32)
    return AttentionStep(
        phase="prefill",
        num_tokens=sum(q_lens),
        padded_num_tokens=max(bucket, sum(q_lens)),
        q_lens=tuple(q_lens),
        seq_lens=tuple(seq_lens),
        requests=lambda: RequestTensors(seq_lens=nothing, block_tables=nothing),
        slot_mapping_gpu=nothing,
        fixed_slots=fixed_slots,
    )


# 32 query heads of 128 in 36 layers, as Qwen3-8B has: 4 * 128 * 32 * 36 FLOPs a query and key.
EIGHT_B = [LayerAttention(i, 32, 8, 128, 128, 0.1) for i in range(36)]
WINDOWED = [replace(layer, window=128) for layer in EIGHT_B]


@pytest.mark.parametrize(
    ("q_lens", "seq_lens", "is_long"),
    [
        ([2048], [2048], False),
        ([4096], [4096], True),
        ([1024], [8192], True),
        ([128] * 32, [128] * 32, False),
        ([1] * 64, [2000] * 64, False),
        ([16], [16], False),
    ],
    ids=["2048", "4096", "1024 behind a prefix of 7168", "32 short prompts", "64 that decode", "16"],
)
def test_the_work_of_the_live_requests_decides(q_lens: list[int], seq_lens: list[int], is_long: bool) -> None:
    attention = made(EIGHT_B)
    chosen = attention.for_step(step_of(q_lens, seq_lens, bucket=8192))
    assert chosen is (attention.long if is_long else attention.short)


def test_keys_outside_of_the_window_are_no_work() -> None:
    step = step_of([4096], [4096])
    attention = made(WINDOWED)
    assert attention.for_step(step) is attention.short
    half = made([*EIGHT_B[:18], *WINDOWED[18:]])
    assert half.for_step(step_of([8192], [8192])) is half.long


def test_a_graph_holds_one_for_its_bucket_whatever_the_step() -> None:
    attention = made(EIGHT_B)
    for lens in ([8192], [1]):
        assert attention.for_step(step_of(lens, lens, bucket=8192, fixed_slots=True)) is attention.long
        tiny = step_of(lens[:1] if lens == [1] else [64], [9000], bucket=64, fixed_slots=True)
        assert attention.for_step(tiny) is attention.short


def test_what_no_graph_can_hold_is_in_none() -> None:
    attention = made(EIGHT_B, long_support="none")
    assert attention.graph_support("prefill") == "varlen"
    assert attention.for_step(step_of([8192], [8192], fixed_slots=True)) is attention.short
    assert attention.for_step(step_of([8192], [8192])) is attention.long


def test_the_first_step_prepares_the_one_for_long_steps_and_later_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = made([PLAIN])
    batch = ragged_batch(PLAIN, [3, 1], [3, 9])
    torch.testing.assert_close(batch.run(attention).double(), batch.expected(), rtol=0, atol=1e-5)
    assert isinstance(attention.long, Noting)
    for _ in range(2):
        assert attention.plan(batch.step).backend is attention.short
        assert attention.long.num_plans == 1
    monkeypatch.setattr(sized, "LONG_FLOPS", 0)
    torch.testing.assert_close(batch.run(attention).double(), batch.expected(), rtol=0, atol=1e-5)
    assert attention.plan(batch.step).backend is attention.long
