"""torch.compile(mode="reduce-overhead") on the body of the same class: inductor's kernels in CUDA graphs."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from breakgraph.bench.config import PrefillBench
from breakgraph.bench.peers import PeerTask
from breakgraph.bench.result import Metric, Row
from breakgraph.bench.timing import interleaved
from breakgraph.errors import ConfigError
from breakgraph.models import resolve_model

_ATTENTION = "sdpa"
_WARM_UPS = 4
"""The first call compiles, the next ones record the graph."""


def measure(task: PeerTask) -> list[Row]:
    """Rows `prefill` of one request. The body only: no metadata, no cache, no logits, so less work than a step of ours.

    Raises:
        ConfigError: not a CUDA device; that mode makes CUDA graphs.
    """
    config = task.config
    assert isinstance(config, PrefillBench)
    device = torch.device(config.device)
    if device.type != "cuda":
        raise ConfigError(f"mode 'reduce-overhead' makes CUDA graphs, got device {config.device!r}")
    torch.cuda.set_device(device)
    source = resolve_model(config.model, load_format="dummy")
    torch.manual_seed(config.seed)
    with device:
        model = AutoModelForCausalLM.from_config(
            source.config, dtype=getattr(torch, task.dtype), attn_implementation=_ATTENTION
        ).eval()
    rows = []
    with torch.no_grad():
        for tokens in sorted(config.tokens):
            torch._dynamo.reset()  # each shape for itself: nothing is compiled for a range of sizes
            rows.append(_case(config, model, tokens, device))
    return rows


def _case(config: PrefillBench, model: Any, tokens: int, device: torch.device) -> Row:
    body = torch.compile(model.base_model, mode="reduce-overhead", dynamic=False)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    input_ids = torch.randint(vocab_size, (1, tokens), device=device)

    def run() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return body(input_ids=input_ids, use_cache=False)

    started = time.perf_counter()
    for _ in range(_WARM_UPS):
        run()
    torch.cuda.synchronize(device)
    compile_sec = time.perf_counter() - started
    samples = interleaved({"body": run}, config.rounds, device)["body"]
    return Row(
        name="prefill",
        params={
            "tokens": tokens,
            "requests": 1,
            "backend": "torch.compile, body only",
            "fusion": "inductor",
            "attention": _ATTENTION,
        },
        metrics={**samples.metrics(), "compile": Metric(value=compile_sec, unit="s")},
    )
