"""vLLM through its Python class, with its defaults, where it is installed."""

from __future__ import annotations

import tempfile
import time
from typing import Any

from breakgraph.bench.config import PrefillBench, ServeBench
from breakgraph.bench.peers import PeerTask
from breakgraph.bench.result import Metric, Row
from breakgraph.bench.serve import serve_metrics
from breakgraph.bench.timing import Samples
from breakgraph.bench.workloads import random_prompts
from breakgraph.errors import ConfigError
from breakgraph.models import resolve_model


def measure(task: PeerTask) -> list[Row]:
    """Rows `prefill` (one request, one token: scheduling and sampling are in the time) or `serve`.

    Raises:
        ConfigError: vLLM is not installed.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(f"vllm does not import ({error}); install it in this environment to compare") from error
    config = task.config
    source = resolve_model(config.model, load_format="dummy")
    if isinstance(config, ServeBench):
        length, seqs, budget = config.prompt_len + config.answer_len, config.seqs, config.max_num_batched_tokens
    else:
        assert isinstance(config, PrefillBench)
        length, seqs, budget = max(config.tokens) + 1, 1, max(config.tokens)
    vocab_size = int(source.config.get_text_config(decoder=True).vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        source.config.save_pretrained(folder)
        llm: Any = LLM(
            model=folder,
            load_format="dummy",
            dtype=task.dtype,
            seed=config.seed,
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        if isinstance(config, ServeBench):
            return [_serve(llm, config, vocab_size)]
        return [_prefill(llm, config, tokens, vocab_size) for tokens in sorted(config.tokens)]


def _serve(llm: Any, config: ServeBench, vocab_size: int) -> Row:
    prompts = random_prompts(config.num_requests, config.prompt_len, vocab_size, config.seed)
    seconds = [_seconds(llm, prompts, config.answer_len) for _ in range(1 + config.rounds)][1:]
    params = {"backend": "vllm", "decode_backend": "its own", "fusion": "its own", "attention": "its own"}
    return Row(name="serve", params={**params}, metrics=serve_metrics(config, seconds, is_timed=True))


def _prefill(llm: Any, config: PrefillBench, tokens: int, vocab_size: int) -> Row:
    prompts = random_prompts(1, tokens, vocab_size, config.seed)
    times = [1e3 * _seconds(llm, prompts, 1) for _ in range(1 + config.rounds)][1:]
    metrics: dict[str, Metric] = Samples(times, times).metrics()
    del metrics["host"]  # the call returns when the results are there
    params = {"backend": "vllm, one token", "fusion": "its own", "attention": "its own"}
    return Row(name="prefill", params={"tokens": tokens, "requests": 1, **params}, metrics=metrics)


def _seconds(llm: Any, prompts: list[list[int]], answer_len: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    short = [output for output in outputs if len(output.outputs[0].token_ids) != answer_len]
    if short:
        raise RuntimeError(f"{len(short)} answers are not of {answer_len} tokens")
    return seconds
