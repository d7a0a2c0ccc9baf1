"""FlashInfer against float64: in breaks, and in graphs that are replayed with other lengths.

Its kernels are compiled on first use, each for minutes. `benchmarks/flashinfer_build.py --kernels check` builds those
of LAYERS at once; `-k "not rare"` leaves the others out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from breakgraph.attention import AttentionBackend, AttentionStep, LayerAttention, make_attention, use_step
from breakgraph.attention.flashinfer import FlashInferAttention
from breakgraph.attention.flashinfer_kernels import PlannedKernel
from breakgraph.graph import PlanFamily
from no_waiting import no_waiting
from unit.attention.ragged import PLAIN, RaggedBatch, ragged_batch, with_changes

WIDE = replace(PLAIN, num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=128**-0.5)
SMALL = replace(PLAIN, num_heads=8, num_kv_heads=1, head_dim=64, v_head_dim=64, scale=0.125)
LAYERS = {
    "plain": WIDE,
    "one head each": replace(WIDE, num_heads=2),
    "eight share a key head": replace(WIDE, num_kv_heads=1),
    "three share a key head": replace(WIDE, num_heads=6),
    "window": replace(WIDE, window=5),
    "window of one": replace(WIDE, window=1),
    "wide window": replace(WIDE, window=64),
    "sinks and window": replace(SMALL, window=9, sinks=torch.linspace(-2, 3, 8)),
}
RARE = {
    "rare softcap": replace(WIDE, softcap=3.0),
    "rare sinks": replace(SMALL, sinks=torch.linspace(-2, 3, 8)),
    "rare 64": SMALL,
    "rare 256": replace(WIDE, head_dim=256, v_head_dim=256, scale=1 / 16),
}
BATCHES = {
    "prompts": ([60, 1, 33, 100], [0, 0, 0, 0]),
    "prefixes": ([60, 5, 33, 100], [3, 70, 17, 90]),
    "mixed with decodes": ([1, 1, 40, 1], [70, 3, 17, 120]),
    "one request": ([7], [0]),
}
TOLERANCE = 3e-2
"""Of one element: three roundings of bfloat16, at values up to about 3."""
SLOTS, BUCKET = 5, 96


def make_batch(layer: LayerAttention, q_lens: list[int], cached_lens: list[int], **options: object) -> RaggedBatch:
    """On the GPU in bfloat16; a decode step has its host lengths."""
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.cuda())
    options = {"max_blocks": 64, "dtype": torch.bfloat16, "device": "cuda"} | options
    batch = ragged_batch(layer, q_lens, cached_lens, **options)
    totals = tuple(new + cached for new, cached in zip(q_lens, cached_lens, strict=True))
    return replace(batch, step=replace(batch.step, q_lens=tuple(q_lens), seq_lens=totals))


def error(batch: RaggedBatch, out: torch.Tensor) -> float:
    return (out[: batch.live].double() - batch.expected()).abs().max().item()


@pytest.mark.parametrize("layer", [*LAYERS.values(), *RARE.values()], ids=[*LAYERS, *RARE])
@pytest.mark.parametrize(("q_lens", "cached_lens"), BATCHES.values(), ids=BATCHES.keys())
def test_prompts(layer: LayerAttention, q_lens: list[int], cached_lens: list[int]) -> None:
    batch = make_batch(layer, q_lens, cached_lens, padding=9)
    out = batch.run(FlashInferAttention([batch.layer]))
    assert error(batch, out) < TOLERANCE
    assert out[batch.live :].eq(0).all()


@pytest.mark.parametrize("layer", [*LAYERS.values(), *RARE.values()], ids=[*LAYERS, *RARE])
@pytest.mark.parametrize("block_size", [4, 16])
def test_decode(layer: LayerAttention, block_size: int) -> None:
    batch = make_batch(layer, [1] * 6, [0, 70, 3, 120, 15, 16], padding=2, phase="decode", block_size=block_size)
    out = batch.run(FlashInferAttention([batch.layer]))
    assert error(batch, out) < TOLERANCE
    assert out.isfinite().all()


@pytest.mark.parametrize("told", [replace(LAYERS["window"], window=6), replace(LAYERS["window"], scale=0.2)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_planted_mistakes_are_caught(told: LayerAttention, phase: str) -> None:
    q_lens, cached_lens = ([1] * 3, [30, 50, 9]) if phase == "decode" else BATCHES["prefixes"]
    batch = make_batch(LAYERS["window"], q_lens, cached_lens, phase=phase)
    assert error(batch, batch.run(FlashInferAttention([told]), told)) > 4 * TOLERANCE


class Static:
    """What a graph reads: the first batch's tensors, into which others are copied."""

    def __init__(self, attention: AttentionBackend, first: RaggedBatch) -> None:
        self.attention, self.batch = attention, first
        attention.bind(first.kv)

    def load(self, batch: RaggedBatch) -> AttentionStep:
        """The batch's step on the static tensors."""
        mine = self.batch
        for name in ("q", "k", "v"):
            getattr(mine, name).copy_(getattr(batch, name))
        names = ("cu_seqlens_q_gpu", "seq_lens_gpu", "block_tables_gpu", "slot_mapping_gpu")
        for name in names:
            getattr(mine.step, name).copy_(getattr(batch.step, name))
        for buffers, new in ((mine.kv.key, batch.kv.key), (mine.kv.value, batch.kv.value)):
            buffers[0].copy_(new[0])
        return with_changes(batch.step, **{name: getattr(mine.step, name) for name in names})

    def forward(self, layer: LayerAttention) -> Callable[[], torch.Tensor]:
        """Attention for the step in progress. The clone is a kernel that the graph has besides."""
        from breakgraph.attention import current_step

        def run() -> torch.Tensor:
            mine = self.batch
            out = torch.full_like(mine.q, torch.nan)
            self.attention.forward(mine.q, mine.k, mine.v, layer, current_step(), out)
            return out.clone()

        return run


def replayed(
    layer: LayerAttention, first: RaggedBatch, others: Iterator[RaggedBatch]
) -> Iterator[tuple[RaggedBatch, torch.Tensor]]:
    """Captures on the first batch, replays on each of the others in poisoned memory: the same bits as eagerly."""
    static = Static(FlashInferAttention([layer]), first)
    with torch.no_grad(), PlanFamily("cuda") as family:
        run = static.forward(layer)
        with use_step(static.attention.plan(first.step)):
            plan = family.capture(run, breaks=False)
        assert plan.num_breaks == 0
        for batch in others:
            with use_step(static.attention.plan(static.load(batch))):
                family.poison()
                out = plan.replay().clone()
                assert torch.equal(out[: batch.live], run()[: batch.live])
                yield batch, out


@pytest.mark.parametrize("name", ["plain", "wide window", "sinks and window"])
def test_one_decode_graph_serves_any_lengths(name: str) -> None:
    first = make_batch(LAYERS[name], [1] * 8, [0] * 8, phase="decode")
    lengths = ([0, 200, 3, 90, 15, 16, 0, 40], [120], [9, 0, 31], [0] * 8)
    batches = (
        make_batch(LAYERS[name], [1] * len(lens), lens, padding=8 - len(lens), phase="decode", seed=seed)
        for seed, lens in enumerate(lengths, start=1)
    )
    others = (with_starts(batch, 8) for batch in batches)
    for batch, out in replayed(first.layer, with_starts(first, 8), others):
        assert error(batch, out) < TOLERANCE
        assert out.isfinite().all()


def with_starts(batch: RaggedBatch, rows: int) -> RaggedBatch:
    """A decode step has no use for them; here they are as long in every batch."""
    return replace(batch, step=with_changes(batch.step, cu_seqlens_q_gpu=torch.arange(rows + 1, device="cuda")))


@pytest.mark.parametrize("name", ["plain", "wide window", "sinks and window"])
def test_one_prefill_graph_serves_any_partition(name: str) -> None:
    layer = LAYERS[name]
    lengths = [([30, 1, 20], [0, 90, 17]), ([96], [0]), ([1] * 5, [3, 70, 0, 15, 16]), ([2], [0]), ([40, 50], [100, 0])]
    first = slotted(make_batch(layer, [90, 6], [0, 0]))
    others = (
        slotted(make_batch(layer, q_lens, cached, padding=BUCKET - sum(q_lens), seed=seed))
        for seed, (q_lens, cached) in enumerate(lengths, start=1)
    )
    for batch, out in replayed(first.layer, first, others):
        assert error(batch, out) < TOLERANCE
        assert out[batch.live :].eq(0).all()


def slotted(batch: RaggedBatch) -> RaggedBatch:
    """The step with SLOTS request slots, sentinels behind the live ones."""
    step, unused = batch.step, SLOTS - len(batch.step.q_lens)
    starts, lens, tables = step.cu_seqlens_q_gpu, step.seq_lens_gpu, step.block_tables_gpu
    assert starts is not None
    return replace(
        batch,
        step=with_changes(
            step,
            fixed_slots=True,
            cu_seqlens_q_gpu=torch.cat([starts, starts[-1:].expand(unused)]),
            seq_lens_gpu=torch.cat([lens, lens.new_zeros(unused)]),
            block_tables_gpu=torch.cat([tables, tables.new_zeros(unused, tables.shape[1])]),
        ),
    )


def test_a_graph_takes_no_step_without_slots() -> None:
    batch = make_batch(WIDE, [5], [0])
    static = Static(FlashInferAttention([WIDE]), batch)
    refused = pytest.raises(RuntimeError, match="fixed request slots")
    with torch.no_grad(), PlanFamily("cuda") as family, use_step(static.attention.plan(batch.step)), refused:
        family.capture(static.forward(WIDE), breaks=False)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The serial of every plan that is made for a step."""
    made: list[int] = []
    plan = PlannedKernel.plan

    def recorded(self: PlannedKernel, pages: object, serial: int) -> None:
        made.extend([serial] if serial else [])
        plan(self, pages, serial)  # type: ignore[arg-type]

    monkeypatch.setattr(PlannedKernel, "plan", recorded)
    return made


def test_layers_of_the_same_constants_share_a_plan(plans: list[int]) -> None:
    other = replace(WIDE, scale=0.2)
    layers = [replace(layer, layer_id=index) for index, layer in enumerate([WIDE, other, WIDE, other])]
    attention = FlashInferAttention(layers)
    batch = make_batch(WIDE, [5, 9], [0, 30])
    attention.bind(batch.kv)
    attention.plan(batch.step)
    attention.plan(batch.step)
    assert plans == [1, 1, 2, 2]


def test_a_later_plan_retires_the_metadata_before_it() -> None:
    attention = FlashInferAttention([WIDE])
    batch = make_batch(WIDE, [5], [0])
    attention.bind(batch.kv)
    stale = attention.plan(batch.step)
    attention.plan(batch.step)
    with pytest.raises(RuntimeError, match=r"call plan\(step\) again"):
        attention.forward(batch.q, batch.k, batch.v, WIDE, stale, torch.empty_like(batch.q))


def test_steps_that_pile_up_on_the_stream_keep_their_plans() -> None:
    """The host is steps ahead: no plan may overtake the one before it."""
    for phase in ("prefill", "decode"):
        attention = FlashInferAttention([WIDE])
        batches = [
            make_batch(
                WIDE, [1] * 3 if phase == "decode" else [1 + seed, 40, 3], [7 * seed, 50, 2], phase=phase, seed=seed
            )
            for seed in range(8)
        ]
        batches[0].run(attention)
        torch.cuda.synchronize()
        with no_waiting(torch.device("cuda")):
            torch.cuda._sleep(50_000_000)
            outs = [batch.run(attention) for batch in batches]
        for batch, out in zip(batches, outs, strict=True):
            assert error(batch, out) < TOLERANCE


def test_auto_takes_it_for_long_prompts() -> None:
    attention = make_attention("auto", "cuda", torch.bfloat16, [WIDE], in_graph=["decode"])
    names = attention.for_phase("prefill").name, attention.for_phase("decode").name
    assert names == ("triton or flashinfer", "triton")
