"""The engine on a tiny model with random weights: prompts are token ids, and the answers are those of eager PyTorch."""

from __future__ import annotations

import tempfile
from typing import Any

from transformers import LlamaConfig

from breakgraph import LLM, SamplingParams

# Any folder with a config.json will do; with weights and a tokenizer in it, drop load_format and pass text.
# LLM("smollm2") fetches a small real model.
folder = tempfile.TemporaryDirectory()
LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
).save_pretrained(folder.name)
prompts = [[11, 12, 13, 14, 15], [21, 22]]
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(**backends: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(
        folder.name,
        load_format="dummy",
        dtype="float32",
        max_num_batched_tokens=16,
        max_num_seqs=2,
        prefill_buckets=[8, 16],
        decode_buckets=[1, 2],
        **backends,
    ) as llm:
        outputs = llm.generate(prompts, greedy)
        return [output.outputs[0].token_ids for output in outputs], llm.stats()["runners"]


captured, stats = answers()
eager, _ = answers(prefill_backend="eager", decode_backend="eager")
folder.cleanup()

for prompt, answer in zip(prompts, captured, strict=True):
    print(f"{prompt} -> {answer}")
for phase, runner in stats.items():
    replays = sum(runner["num_replays_by_bucket"].values())
    print(f"{phase}: {runner['backend']}, buckets {runner['captured_buckets']}, {replays} replays")
assert captured == eager
print("captured answers equal eager ones: yes")
