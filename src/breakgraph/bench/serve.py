"""Offline batch: all requests are there from the start, answers are greedy and of one length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from breakgraph.backends import backend_class
from breakgraph.bench.arms import Setting, describe, give_memory_back, kernel_rows, shape_only
from breakgraph.bench.ceilings import Ceilings, step_work
from breakgraph.bench.config import ServeBench
from breakgraph.bench.profiler import gpu_profile
from breakgraph.bench.result import Metric, Row, Scalar
from breakgraph.bench.workloads import even_lens, random_prompts
from breakgraph.engine.llm import LLM
from breakgraph.engine.outputs import RequestOutput
from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.models import HFModel


def measure(setting: Setting) -> Iterator[Row]:
    """Rows `serve`, one a backend, and on a GPU where its time goes. The prefix cache is off; the first round is not
    counted."""
    config = setting.config
    assert isinstance(config, ServeBench)
    if setting.ceilings is not None:
        row = _roofline_row(setting, config, setting.ceilings)
        setting.tell(describe(row))
        yield row
    for fusion in config.fusion:
        for attention in config.attention:
            for backend in config.backends:
                options = {"max_model_len": config.prompt_len + config.answer_len, "max_num_seqs": config.seqs}
                options["max_num_batched_tokens"] = config.max_num_batched_tokens
                llm = open_llm(setting, backend, fusion, attention, options)
                if llm is None:
                    continue
                with llm:
                    yield from _arm(setting, config, llm, {"backend": backend, "fusion": fusion})
                del llm
                give_memory_back()


def open_llm(
    setting: Setting, backend: str, fusion: str, attention: str, options: Mapping[str, Any]
) -> LLM | None:
    """A captured model without prefix cache, or None, with the reason noted, where these do not go together."""
    config = setting.config
    try:
        return LLM(
            config.model,
            load_format="dummy",
            dtype=config.dtype,
            device=config.device,
            seed=config.seed,
            fusion=fusion,
            attention=attention,
            enable_prefix_caching=False,
            use_tqdm=False,
            **engine_backends(backend),
            **options,
        )
    except ConfigError as error:
        setting.leave_out(f"{backend} with attention {attention}", error)
        return None


def engine_backends(backend: str) -> dict[str, Any]:
    """The engine's options for it: where prompts are captured, decode is too, as full graphs."""
    return {"prefill_backend": backend, "decode_backend": "full" if backend_class(backend).captures else backend}


def _arm(setting: Setting, config: ServeBench, llm: LLM, arm: dict[str, Scalar]) -> Iterator[Row]:
    vocab_size = llm.engine.facts.vocab_size
    prompts = random_prompts(config.num_requests, config.prompt_len, vocab_size, config.seed)
    greedy = SamplingParams(temperature=0.0, max_tokens=config.answer_len, ignore_eos=True)

    def generate() -> list[RequestOutput]:
        return llm.generate(prompts, greedy, use_tqdm=False)

    generate()
    before, seconds = llm.stats(), []
    for _ in range(config.rounds):
        started = time.perf_counter()
        outputs = generate()
        seconds.append(time.perf_counter() - started)
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        expected = config.num_requests * config.answer_len
        assert num_tokens == expected, f"{num_tokens} tokens came back, {expected} were asked for"
    stats = llm.stats()
    metrics = serve_metrics(config, seconds, is_timed=setting.ceilings is not None) | _steps(before, stats)
    used = " + ".join(dict.fromkeys(stats["attention"].values()))
    params = arm | {"decode_backend": stats["runners"]["decode"]["backend"], "attention": used}
    kernels: list[Row] = []
    if setting.ceilings is not None:
        profile = gpu_profile(generate, setting.device, rounds=1)
        metrics["gpu_busy"] = Metric(value=profile.busy_ms / 1e3, unit="s")
        kernels = kernel_rows(params, profile.kernels)
    row = Row(name="serve", params=params, metrics=metrics)
    setting.tell(describe(row))
    yield from (row, *kernels)


def serve_metrics(config: ServeBench, seconds: list[float], *, is_timed: bool) -> dict[str, Metric]:
    """What peers report too. The spread is that of all rounds."""
    num_answer_tokens = config.num_requests * config.answer_len
    counts = {"requests": config.num_requests, "answer_tokens": num_answer_tokens}
    metrics = {name: Metric(value=count, unit="count") for name, count in counts.items()}
    if not is_timed:
        return metrics
    median = statistics.median(seconds)
    times = {"time": median, "fastest": min(seconds), "slowest": max(seconds)}
    return metrics | {
        **{name: Metric(value=value, unit="s") for name, value in times.items()},
        "answer_rate": Metric(value=num_answer_tokens / median, unit="tokens/s"),
    }


def _steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Metric]:
    """Steps of the counted rounds, and the share of them that were replays."""
    replays = _num_steps(after, "num_replays_by_bucket") - _num_steps(before, "num_replays_by_bucket")
    eager = _num_steps(after, "num_eager_steps_by_reason") - _num_steps(before, "num_eager_steps_by_reason")
    return {
        "replays": Metric(value=replays, unit="count"),
        "eager_steps": Metric(value=eager, unit="count"),
        "graph_hit_rate": Metric(value=100 * replays / (replays + eager), unit="percent"),
    }


def _num_steps(stats: Mapping[str, Any], counter: str) -> int:
    return sum(sum(runner[counter].values()) for runner in stats["runners"].values())


def _roofline_row(setting: Setting, config: ServeBench, ceilings: Ceilings) -> Row:
    seconds = _roofline_sec(config, ceilings, shape_only(setting))
    return Row(name="serve roofline", params={}, metrics={"time": Metric(value=seconds, unit="s")})


def _roofline_sec(config: ServeBench, ceilings: Ceilings, model: HFModel) -> float:
    """Seconds that the whole batch takes at least: prompts in steps as large as allowed, then one step a token."""
    seconds = 0.0
    per_step = max(1, config.max_num_batched_tokens // config.prompt_len)
    for num_reqs in even_lens(config.num_requests, -(-config.num_requests // per_step)):
        lens = [config.prompt_len] * num_reqs
        seconds += ceilings.floor_ms(step_work(model, lens, lens)) / 1e3
    for num_reqs in even_lens(config.num_requests, -(-config.num_requests // config.seqs)):
        for answered in range(1, config.answer_len):
            work = step_work(model, [1] * num_reqs, [config.prompt_len + answered] * num_reqs)
            seconds += ceilings.floor_ms(work) / 1e3
    return seconds
