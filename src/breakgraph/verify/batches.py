"""Random steps for the buckets of a phase."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from breakgraph.runners import PhaseSpec, StepBatch
from breakgraph.runners.spec import last_rows


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the steps may use.

    Attributes:
        blocks: KV blocks that belong to nobody.
        vocab_size: Token ids are below it.
        max_model_len: Tokens of one request, at most.
    """

    blocks: Sequence[int]
    vocab_size: int
    max_model_len: int


def sizes_of(spec: PhaseSpec, size: int, rng: random.Random, rounds: int) -> list[int]:
    """Live sizes that land in the bucket: twice its own, then the smallest, then random ones. Full ones come first, so
    that what they leave behind is there when smaller ones run."""
    index = spec.ladder.index(size)
    low = spec.ladder[index - 1] + 1 if index else 1
    return [size, size, low, *(rng.randint(low, size) for _ in range(rounds - 3))][:rounds]


def random_batch(spec: PhaseSpec, size: int, live: int, limits: Limits, rng: random.Random, few: bool) -> StepBatch:
    """``live`` tokens or requests, as the phase counts, for the bucket ``size``; fewer if the blocks hold no more.

    Args:
        few: As few requests as can be, or as many as a random partition has. Some have a cached prefix, one a long one.
    """
    q_lens = _partition(spec, size, live, limits, rng, few)
    num_blocks = len(limits.blocks)
    needed = sum(-(-q // spec.block_size) for q in q_lens)
    while len(q_lens) > 1 and needed > num_blocks:
        needed -= -(-q_lens.pop() // spec.block_size)
    spare = min(num_blocks - needed, -(-(limits.max_model_len + live) // spec.block_size)) * spec.block_size
    seq_lens = []
    for index, q_len in enumerate(q_lens):
        # Rounding up to a block costs each request one at most: keep that much.
        room = min(limits.max_model_len - q_len, spare - (len(q_lens) - index) * spec.block_size)
        prefix = (
            rng.randint(room // 2 if index == 0 else 0, room) if room > 0 and (index == 0 or rng.random() < 0.5) else 0
        )
        spare -= prefix
        seq_lens.append(q_len + prefix)
    free = list(limits.blocks)
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(-(-n // spec.block_size))] for n in seq_lens]
    spans = [range(n - q, n) for q, n in zip(q_lens, seq_lens, strict=True)]
    return StepBatch(
        input_ids=[rng.randrange(limits.vocab_size) for span in spans for _ in span],
        positions=[position for span in spans for position in span],
        slot_mapping=[
            table[p // spec.block_size] * spec.block_size + p % spec.block_size
            for table, span in zip(tables, spans, strict=True)
            for p in span
        ],
        q_lens=q_lens,
        seq_lens=seq_lens,
        block_tables=tables,
        logits_rows=last_rows(q_lens),
    )


def _partition(
    spec: PhaseSpec, size: int, live: int, limits: Limits, rng: random.Random, few: bool
) -> list[int]:  # fmt: skip
    if spec.tokens_per_req is not None:
        requests = live if spec.size_axis == "requests" else live // spec.tokens_per_req
        return [spec.tokens_per_req] * requests
    # One token of a request is left for a prefix, so that some have one.
    longest, most = limits.max_model_len - 1, spec.num_rows("requests", size)
    fewest = min(-(-live // longest), most)
    live = min(live, most * longest, len(limits.blocks) * spec.block_size)
    count = fewest if few else rng.randint(min(2, most, live), min(most, live))
    count = max(count, fewest)
    cuts = sorted(rng.sample(range(1, live), count - 1))
    q_lens = [end - start for start, end in zip([0, *cuts], [*cuts, live], strict=True)]
    return [min(q_len, longest) for q_len in q_lens]


def describe(batch: StepBatch) -> str:
    """A step in a few words."""
    prefixes = sum(n > q for q, n in zip(batch.q_lens, batch.seq_lens, strict=True))
    requests = "1 request" if batch.num_reqs == 1 else f"{batch.num_reqs} requests"
    return (
        f"{batch.num_tokens} tokens in {requests}, {prefixes} with cached tokens, {max(batch.seq_lens)} in the longest"
    )
