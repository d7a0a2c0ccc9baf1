"""Random steps: always valid, both ends of a bucket, few and many requests, within the blocks there are."""

from __future__ import annotations

import random

import pytest

from breakgraph.runners import PhaseSpec
from breakgraph.verify.batches import Limits, describe, random_batch, sizes_of
from unit.runners.fakes import NUM_BLOCKS, make_decode_spec, make_prefill_spec

SPECS = {
    "prefill": make_prefill_spec(),
    "slots": make_prefill_spec(request_slots=3),
    "decode": make_decode_spec(),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS - 1, 12, 5])
@pytest.mark.parametrize("max_model_len", [32, 30])
def test_steps_fit_the_phase_and_the_blocks(spec: PhaseSpec, num_blocks: int, max_model_len: int) -> None:
    limits = Limits(blocks=range(1, 1 + num_blocks), vocab_size=7, max_model_len=max_model_len)
    partitions = set()
    for seed in range(40):
        rng = random.Random(seed)
        size = rng.choice(spec.ladder)
        for number, live in enumerate(sizes_of(spec, size, rng, 4)):
            batch = random_batch(spec, size, live, limits, rng, few=number % 2 == 0)
            spec.check(batch)
            used = [block for table in batch.block_tables for block in table]
            assert len(set(used)) == len(used)
            assert set(used) <= set(limits.blocks)
            assert max(batch.seq_lens) <= max_model_len
            assert max(batch.input_ids) < 7
            assert spec.bucket_for(batch.num_tokens, batch.num_reqs) is not None
            partitions.add((size, tuple(batch.q_lens)))
            if num_blocks == NUM_BLOCKS - 1:
                assert spec.bucket_for(batch.num_tokens, batch.num_reqs) == size
    assert len(partitions) >= len(spec.ladder)


def test_a_bucket_is_filled_twice_and_entered_at_its_lower_end() -> None:
    sizes = sizes_of(SPECS["prefill"], 8, random.Random(0), 5)
    assert sizes[:3] == [8, 8, 5]
    assert all(5 <= size <= 8 for size in sizes)
    assert sizes_of(SPECS["prefill"], 4, random.Random(0), 3) == [4, 4, 1]


def test_few_is_one_request_and_many_are_several() -> None:
    limits = Limits(blocks=range(1, NUM_BLOCKS), vocab_size=7, max_model_len=32)
    few, many = (random_batch(SPECS["prefill"], 16, 16, limits, random.Random(1), few=few) for few in (True, False))
    assert few.num_reqs == 1
    assert many.num_reqs > 1
    assert few.num_tokens == many.num_tokens == 16
    assert describe(few).startswith("16 tokens in 1 request, 1 with cached tokens, ")
