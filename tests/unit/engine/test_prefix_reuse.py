"""Prefix reuse and preemption on a real small model: the same tokens, and no byte written where it doesn't belong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from breakgraph import LLM, SamplingParams
from breakgraph.runners import StepBatch

OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 96,
    "block_size": 4,
    "prefill_buckets": (16, 64),
    "decode_buckets": (4, 8),
    "use_tqdm": False,
}
EAGER = {"prefill_backend": "eager", "decode_backend": "eager"}
ROOMY, TIGHT = 2500, 30
"""Blocks: enough to keep all that was ever computed; little more than one request of the greatest length."""
NUM_CONVERSATIONS, NUM_TURNS = 200, 3
MAX_TOKENS = 6

Turns = list[list[list[int]]]
"""By turn and conversation: the tokens of the answer."""


@contextmanager
def open_llm(folder: Path, device: torch.device, **options: Any) -> Iterator[LLM]:
    with LLM(str(folder), device=str(device), **{**OPTIONS, **options}) as llm:
        yield llm
        stats = llm.stats()
        assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
        assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"] - 1


def converse(llm: LLM) -> Turns:
    """Conversations that begin with one of four system prompts, each turn with all that was said before."""
    rng = random.Random(5)

    def some_tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(96) for _ in range(rng.randint(low, high))]

    system_prompts = [some_tokens(10, 30) for _ in range(4)]
    histories = [rng.choice(system_prompts) + some_tokens(1, 8) for _ in range(NUM_CONVERSATIONS)]
    turns = []
    for _ in range(NUM_TURNS):
        outputs = llm.generate(histories, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
        turns.append([output.outputs[0].token_ids for output in outputs])
        histories = [h + answer + some_tokens(1, 5) for h, answer in zip(histories, turns[-1], strict=True)]
    return turns


def watch_writes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From now on each step is checked: it changes the bytes of its slots and no others, and no block that others use.

    Returns a count of what was seen.
    """
    kv, scheduler, seen = llm.engine.kv, llm.engine.scheduler, Counter[str]()
    assert kv is not None
    buffers: list[Tensor] = [*kv.key.values(), *kv.value.values()]

    def check(batch: StepBatch, run: Callable[[StepBatch], Tensor]) -> Tensor:
        slots = [int(slot) for slot in batch.slot_mapping]
        written = {slot // kv.block_size for slot in slots}
        users = Counter(block for request in scheduler.running for block in request.block_ids)
        assert 0 not in written
        assert not [block for block in written if users[block] != 1 or block in scheduler.allocator.prefix_cache]
        for buffer in buffers:
            # So that a slot that is written is seen to be, even with the bytes that it had.
            buffer.flatten(0, 1)[slots] = torch.nan
        before = [buffer.clone() for buffer in buffers]
        logits = run(batch)
        for old, new in zip(before, buffers, strict=True):
            is_changed = (old.view(torch.int32) != new.view(torch.int32)).flatten(2).any(dim=2).flatten()
            is_changed[: kv.block_size] = False  # the reserved block
            assert is_changed.nonzero().flatten().tolist() == sorted(slots)
        seen["steps"] += 1
        seen["shared"] += sum(count > 1 for count in users.values())
        return logits

    for runner in llm.engine.runners.values():
        monkeypatch.setattr(runner, "run", lambda batch, run=runner.run: check(batch, run))
    return seen


@pytest.fixture(scope="module")
def without_reuse(llama_folder: Path, device: torch.device) -> Turns:
    options = {"num_gpu_blocks_override": ROOMY, "enable_prefix_caching": False, **EAGER}
    with open_llm(llama_folder, device, **options) as llm:
        turns = converse(llm)
        stats = llm.stats()
    assert (stats["num_prefix_cached_tokens"], stats["num_cached_kv_blocks"], stats["num_preemptions"]) == (0, 0, 0)
    return turns


def test_answers_are_the_same_with_reuse_and_most_of_the_prompts_is_not_computed(
    llama_folder: Path, device: torch.device, without_reuse: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed, so that the padding of a bucket writes too."""
    with open_llm(llama_folder, device, num_gpu_blocks_override=ROOMY) as llm:
        seen = watch_writes(llm, monkeypatch)
        assert converse(llm) == without_reuse
        stats = llm.stats()
    assert stats["num_preemptions"] == 0
    assert stats["num_prefix_cached_tokens"] > 0.6 * stats["num_prompt_tokens"]
    assert stats["num_cached_kv_blocks"] > NUM_CONVERSATIONS
    assert seen["shared"] > seen["steps"] > NUM_CONVERSATIONS


def test_answers_are_the_same_where_blocks_are_evicted_and_requests_preempted(
    llama_folder: Path, device: torch.device, without_reuse: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(llama_folder, device, num_gpu_blocks_override=TIGHT, **EAGER) as llm:
        seen = watch_writes(llm, monkeypatch)
        assert converse(llm) == without_reuse
        stats = llm.stats()
    assert stats["num_preemptions"] > 20
    assert 0 < stats["num_prefix_cached_tokens"] < stats["num_prompt_tokens"]
    assert seen["shared"] > seen["steps"] > NUM_CONVERSATIONS


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_go_on_with_their_random_numbers_and_their_text(
    llama_folder: Path, device: torch.device, enable_prefix_caching: bool
) -> None:
    """Seeds and stop strings: nothing is drawn or put into the text twice."""
    rng = random.Random(6)
    prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 30))] for _ in range(24)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop=["A", "b0"] if i % 2 else None) for i in range(24)
    ]
    found, num_preemptions = [], []
    for num_blocks in (ROOMY, TIGHT):
        options = {"num_gpu_blocks_override": num_blocks, "enable_prefix_caching": enable_prefix_caching, **EAGER}
        with open_llm(llama_folder, device, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            num_preemptions.append(llm.stats()["num_preemptions"])
        found.append([output.outputs[0] for output in outputs])
    assert found[0] == found[1]
    assert num_preemptions[0] == 0
    assert num_preemptions[1] > 10
    assert {completion.finish_reason for completion in found[0]} == {"stop", "length"}


def test_an_output_says_how_much_of_its_prompt_was_cached(llama_folder: Path, device: torch.device) -> None:
    prompt = list(range(30))
    with open_llm(llama_folder, device, **EAGER) as llm:
        outputs = [llm.generate(prompt, use_tqdm=False)[0] for _ in range(2)]
        llm.reset_prefix_cache()
        outputs += llm.generate(prompt, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0, 28, 0]
        assert llm.stats()["num_prompt_tokens"] == 90
