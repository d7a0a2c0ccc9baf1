"""Logits of packed, paged, chunked and padded steps equal what `transformers` computes for each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from breakgraph.attention import LayerAttention, make_attention, use_step
from breakgraph.graph import PlanFamily
from breakgraph.models import HFModel
from packed_driver import BLOCK_SIZE, PackedDriver, TokenSequence
from tiny_models import TINY_CONFIGS, VOCAB_SIZE, tiny_model

TOLERANCE = 1e-4
NUM_DECODED = 4

Layers = Iterable[LayerAttention]


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Comparison:
    """A packed model beside an eager one with the same weights."""

    def __init__(self, name: str, change: Callable[[Layers], Layers] = lambda layers: layers) -> None:
        self.reference = tiny_model(name, "eager")
        self.model = HFModel(tiny_model(name, "breakgraph"), name)
        layers = list(change(self.model.layers))
        self.driver = PackedDriver(self.model, make_attention("auto", "cpu", torch.float32, layers))
        self._expected: dict[tuple[int, ...], torch.Tensor] = {}
        self.error = 0.0

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self._expected:
            self._expected[key] = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return self._expected[key]

    def step(self, work: list[tuple[TokenSequence, int]], padding: int = 0, phase: str = "prefill") -> None:
        """Runs one step and compares every live row of it."""
        firsts = [sequence.num_done for sequence, _ in work]
        for logits, first, (sequence, count) in zip(
            self.driver.step(work, padding=padding, phase=phase), firsts, work, strict=True
        ):
            rows = self.expected(sequence.tokens)[first : first + count]
            self.error = max(self.error, (logits - rows).abs().max().item())


def prefill_then_decode(comparison: Comparison) -> list[TokenSequence]:
    lens = [7, 13, 21]
    sequences = [TokenSequence(random_tokens(n + NUM_DECODED, seed=n)) for n in lens]
    comparison.step(list(zip(sequences, lens, strict=True)), padding=5)
    for _ in range(NUM_DECODED):
        comparison.step([(sequence, 1) for sequence in sequences], padding=2, phase="decode")
    return sequences


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_kind_of_step(name: str) -> None:
    comparison = Comparison(name)
    sequences = prefill_then_decode(comparison)

    shared = 3 * BLOCK_SIZE
    other = TokenSequence(sequences[2].tokens[:shared] + random_tokens(6, seed=1), shared, sequences[2].blocks[:3])
    comparison.step([(other, 6)], padding=3)

    chunked, decoding = TokenSequence(random_tokens(17, seed=2)), TokenSequence(random_tokens(10, seed=3))
    comparison.step([(decoding, 6)])
    for count in (5, 5, 5, 2):
        comparison.step([(decoding, 1), (chunked, count)], padding=4)
    assert comparison.error < TOLERANCE


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_captured_decode_equals_eager_bit_for_bit_and_transformers_closely(name: str) -> None:
    comparison = Comparison(name)
    driver, model = comparison.driver, comparison.model
    sequences = [TokenSequence(random_tokens(n + 2, seed=n)) for n in (9, 14)]
    driver.step([(sequences[0], 9), (sequences[1], 14)])
    step, ids, positions = driver.prepare([(s, 1) for s in sequences], padding=1, phase="decode")
    input_ids_buf, positions_buf, rows = torch.tensor(ids), torch.tensor(positions), torch.arange(3)

    def forward() -> torch.Tensor:
        return model.forward(input_ids_buf, positions_buf, rows)

    with torch.inference_mode(), PlanFamily("cpu") as family, use_step(driver.attention.plan(step)):
        plan = family.capture(forward, breaks=False)
        for _ in range(2):
            new, ids, positions = driver.prepare([(s, 1) for s in sequences], padding=1, phase="decode")
            input_ids_buf.copy_(torch.tensor(ids))
            positions_buf.copy_(torch.tensor(positions))
            for field in ("seq_lens_gpu", "block_tables_gpu", "slot_mapping_gpu"):
                getattr(step, field).copy_(getattr(new, field))
            family.poison()
            logits = plan.replay().clone()
            assert torch.equal(logits, forward())
            for row, sequence in enumerate(sequences):
                expected = comparison.expected(sequence.tokens)[sequence.num_done]
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=TOLERANCE)
                sequence.num_done += 1


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_captured_prefill_serves_another_batch(name: str) -> None:
    comparison = Comparison(name)
    driver, model = comparison.driver, comparison.model
    sequences = [TokenSequence(random_tokens(20, seed=n)) for n in range(3)]
    bucket = 16
    input_ids_buf, positions_buf = torch.zeros(bucket, dtype=torch.int64), torch.zeros(bucket, dtype=torch.int64)
    rows = torch.arange(bucket)

    def forward() -> torch.Tensor:
        return model.forward(input_ids_buf, positions_buf, rows)

    def load(counts: list[int]) -> object:
        work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        step, ids, positions = driver.prepare(work, bucket - sum(counts), "prefill")
        input_ids_buf.copy_(torch.tensor(ids))
        positions_buf.copy_(torch.tensor(positions))
        return use_step(driver.attention.plan(step))

    with torch.inference_mode(), PlanFamily("cpu") as family:
        with load([16, 0, 0]):
            plan = family.capture(forward)
        assert plan.num_breaks == len(model.layers)
        for counts in ([9, 4, 0], [1, 3, 12]):
            with load(counts):
                family.poison()
                logits = plan.replay().clone()
                assert torch.equal(logits, forward())
            row = 0
            for sequence, count in zip(sequences, counts, strict=True):
                expected = comparison.expected(sequence.tokens)[sequence.num_done : sequence.num_done + count]
                torch.testing.assert_close(logits[row : row + count], expected, rtol=0, atol=TOLERANCE)
                sequence.num_done += count
                row += count


def each(**changes: Callable[[LayerAttention], object]) -> Callable[[Layers], Layers]:
    """A change to every layer that has a value there."""

    def change(layers: Layers) -> Layers:
        for layer in layers:
            present = {k: fn(layer) for k, fn in changes.items() if getattr(layer, k) is not None}
            yield replace(layer, **present)

    return change


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mistral", each(window=lambda layer: layer.window + 1)),
        ("gemma3", each(window=lambda layer: layer.window + 1)),
        ("gpt_oss", each(sinks=lambda layer: None)),
        ("gemma2", each(softcap=lambda layer: None)),
        ("llama", each(scale=lambda layer: layer.scale * 1.01)),
        ("deepseek_v3", each(scale=lambda layer: layer.v_head_dim**-0.5)),
    ],
)
def test_planted_mistakes_are_caught(name: str, mistake: Callable[[Layers], Layers]) -> None:
    comparison = Comparison(name, mistake)
    prefill_then_decode(comparison)
    assert comparison.error > 10 * TOLERANCE


def test_only_the_chosen_rows_get_logits() -> None:
    comparison = Comparison("gemma2")
    driver, sequence = comparison.driver, TokenSequence(random_tokens(9, seed=0))
    step, ids, positions = driver.prepare([(sequence, 9)], padding=3, phase="prefill")
    rows = torch.tensor([8, 2, 2])
    with torch.inference_mode(), use_step(driver.attention.plan(step)):
        logits = comparison.model.forward(torch.tensor(ids), torch.tensor(positions), rows)
    assert logits.shape == (3, VOCAB_SIZE)
    torch.testing.assert_close(logits, comparison.expected(sequence.tokens)[rows], rtol=0, atol=TOLERANCE)
