"""What a step needs at least, beside a count by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from breakgraph.attention import LayerAttention
from breakgraph.bench.ceilings import Ceilings, Work, _attention_pairs, measure_ceilings, step_work
from breakgraph.errors import ConfigError
from breakgraph.models import HFModel
from breakgraph.models.support import build_model
from tiny_models import tiny_config


def shape(name: str) -> HFModel:
    with torch.device("meta"):
        return HFModel(build_model(tiny_config(name), torch.bfloat16, experts="batched_mm"), name)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(("q_len", "seq_len"), [(1, 1), (1, 9), (5, 5), (4, 9), (7, 20)])
def test_pairs_are_those_of_a_causal_mask(window: int | None, q_len: int, seq_len: int) -> None:
    layer = LayerAttention(0, 4, 2, 16, 16, 0.25, window=window)
    seen = {
        (query, key)
        for query, key in itertools.product(range(seq_len - q_len, seq_len), range(seq_len))
        if key <= query and (window is None or key > query - window)
    }
    assert _attention_pairs(layer, [q_len, q_len], [seq_len, seq_len]) == (
        2 * len(seen),
        2 * len({key for _, key in seen}),
    )


def test_a_dense_step() -> None:
    """hidden 64, 4 heads and 2 key heads of 16, intermediate 96, 2 layers, 96 tokens in the vocabulary, not tied."""
    work = step_work(shape("llama"), [3, 5], [3, 5])
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    pairs = 3 * 4 // 2 + 5 * 6 // 2
    assert work.flops == 2 * 8 * 2 * layer + 2 * 2 * 96 * 64 + 2 * 2 * 4 * 32 * pairs
    norms = 2 * 2 * 64 + 64
    kv = 2 * 2 * 32 * 8
    assert work.num_bytes == 2 * (2 * layer + 96 * 64 + norms + 8 * 64 + kv)


def test_cached_tokens_are_read_and_not_computed() -> None:
    model = shape("llama")
    short, long = step_work(model, [1], [1]), step_work(model, [1], [101])
    assert long.num_bytes - short.num_bytes == 100 * 2 * 2 * (16 + 16) * 2
    assert long.flops - short.flops == 100 * 2 * 2 * 4 * 32


def test_only_the_experts_that_are_reached_count() -> None:
    """8 experts of 3 * 64 * 32 weights in each of 2 layers, of which a token takes 2."""
    model = shape("qwen3_moe")
    experts = 2 * 8 * 3 * 64 * 32
    one, many = step_work(model, [1], [1]), step_work(model, [500], [500])
    rest = one.num_bytes - 2 * experts * 2 / 8
    assert 0 < rest < 2 * experts
    others = 499 * 2 * (64 + 2 * 2 * 32)  # rows of the embedding, keys and values
    assert many.num_bytes - one.num_bytes - others == pytest.approx(2 * experts * (1 - 2 / 8))
    grown = step_work(model, [2], [2]).flops - one.flops
    assert 2 * experts * 2 / 8 < grown < 2 * experts


def test_a_tied_embedding_is_read_once_as_the_head() -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    with torch.device("meta"):
        tied = HFModel(build_model(config, torch.bfloat16, experts="batched_mm"), "tied")
    assert step_work(tied, [4], [4]) == step_work(shape("llama"), [4], [4])


def test_the_roofline_is_the_slower_of_bytes_and_operations() -> None:
    ceilings = Ceilings(
        copy_gb_per_sec=4000.0, matrix_tflop_per_sec=800.0, launch_us=10.0, dtype=torch.bfloat16
    )
    assert ceilings.floor_ms(Work(flops=0, num_bytes=16e9)) == pytest.approx(4.0)
    assert ceilings.floor_ms(Work(flops=8e12, num_bytes=16e9)) == pytest.approx(10.0)
    assert ceilings.bytes_ms(Work(flops=8e12, num_bytes=16e9)) == pytest.approx(4.0)
    units = [metric.unit for row in ceilings.rows() for metric in row.metrics.values()]
    assert units == ["GB/s", "TFLOP/s", "us"]


def test_a_full_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    with pytest.raises(ConfigError, match=r"at least 4 GiB free on cuda:0, 3\.0 GiB are"):
        measure_ceilings(torch.device("cuda", 0), torch.bfloat16)
