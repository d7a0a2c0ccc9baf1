"""The same class of transformers as a user calls it: eager, with its own attention and a cache of its own."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from breakgraph.bench.config import PrefillBench
from breakgraph.bench.peers import PeerTask
from breakgraph.bench.result import Row
from breakgraph.bench.timing import MIN_ROUNDS, interleaved
from breakgraph.models import resolve_model


def measure(task: PeerTask) -> list[Row]:
    """Rows `prefill` of one request: the call that begins an answer, which fills a new cache and gives the logits of
    the last token. A fifth of the rounds, as for eager steps of ours."""
    config = task.config
    assert isinstance(config, PrefillBench)
    device = torch.device(config.device)
    source = resolve_model(config.model, load_format="dummy")
    torch.manual_seed(config.seed)
    with device:
        model = AutoModelForCausalLM.from_config(source.config, dtype=getattr(torch, task.dtype)).eval()
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    rows = []
    with torch.no_grad():
        for tokens in sorted(config.tokens):
            input_ids = torch.randint(vocab_size, (1, tokens), device=device)
            runs = {"eager": lambda ids=input_ids: model(input_ids=ids, use_cache=True, logits_to_keep=1)}
            samples = interleaved(runs, max(MIN_ROUNDS, config.rounds // 5), device)["eager"]
            params = {
                "tokens": tokens,
                "requests": 1,
                "backend": "transformers, eager",
                "fusion": "none",
                "attention": model.config._attn_implementation,
            }
            rows.append(Row(name="prefill", params=params, metrics=samples.metrics()))
    return rows
