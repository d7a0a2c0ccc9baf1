"""Continuous batching of transformers, on the same class with its own choice of attention and graphs."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from breakgraph.bench.config import ServeBench
from breakgraph.bench.peers import PeerTask
from breakgraph.bench.result import Row
from breakgraph.bench.serve import serve_metrics
from breakgraph.bench.workloads import random_prompts
from breakgraph.models import resolve_model

_WAIT_SEC = 1.0
_WARM_UP_SHARE = 16
"""The first one of so many requests runs ahead of what is timed."""
NO_EOS = -1
"""No token has this id, so every answer has its full length."""


def measure(task: PeerTask) -> list[Row]:
    """One row `serve`; its attention is the one that transformers switched to."""
    config = task.config
    assert isinstance(config, ServeBench)
    source = resolve_model(config.model, load_format="dummy")
    device = torch.device(config.device)
    torch.manual_seed(config.seed)
    with device:
        model: Any = AutoModelForCausalLM.from_config(source.config, dtype=getattr(torch, task.dtype)).eval()
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompts = random_prompts(config.num_requests, config.prompt_len, vocab_size, config.seed)
    generation = GenerationConfig(
        max_new_tokens=config.answer_len, do_sample=False, eos_token_id=NO_EOS, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        max_batch_tokens=config.max_num_batched_tokens, max_requests_per_batch=config.seqs, allow_block_sharing=False
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        attention = model.config._attn_implementation
        # A whole round more takes it minutes, and what is done once is done by then.
        _round(manager, prompts[: max(1, len(prompts) // _WARM_UP_SHARE)], config.answer_len)
        seconds = [_round(manager, prompts, config.answer_len) for _ in range(config.rounds)]
    return [
        Row(
            name="serve",
            params={
                "backend": "transformers continuous batching",
                "decode_backend": "its own",
                "fusion": "none",
                "attention": attention,
            },
            metrics=serve_metrics(config, seconds, is_timed=True),
        )
    ]


def _round(manager: Any, prompts: list[list[int]], answer_len: int) -> float:
    """Seconds until all answers are there."""
    started = time.perf_counter()
    waiting = set(manager.add_requests(prompts, max_new_tokens=answer_len))
    while waiting:
        output = manager.get_result(timeout=_WAIT_SEC)
        if output is None:
            if not manager.is_running():
                raise RuntimeError(f"the generation thread ended with {len(waiting)} requests left")
            continue
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        if not output.is_finished():
            continue
        if len(output.generated_tokens) != answer_len:
            raise RuntimeError(f"{len(output.generated_tokens)} tokens came back, {answer_len} were asked for")
        waiting.discard(output.request_id)
    return time.perf_counter() - started
