"""What an engine captured and what ran how, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breakgraph.engine.engine import Engine
    from breakgraph.runners import Runner


def engine_stats(engine: Engine) -> dict[str, Any]:
    """JSON-able; counts are `num_...`, sizes and times carry their unit.

    `num_prefix_cached_tokens` of `num_prompt_tokens` were found in the prefix cache when their requests started; what a
    preempted request finds again counts in neither.
    """
    config, kv, scheduler = engine.config, engine.kv, engine.scheduler
    assert kv is not None, "an open engine has a KV cache"
    return {
        "model": config.model,
        "device": config.device,
        "emulated": config.device == "cpu",
        "dtype": config.dtype,
        "attention": {phase: runner.attention.for_phase(phase).name for phase, runner in engine.runners.items()},
        "max_model_len": config.max_model_len,
        "num_kv_blocks": kv.num_blocks,
        "num_free_kv_blocks": scheduler.allocator.num_free,
        "num_cached_kv_blocks": len(scheduler.allocator.prefix_cache),
        "kv_cache_bytes": kv.num_bytes,
        "pool_bytes": engine.family.pool_bytes,
        "output_bytes": engine.family.output_bytes,
        "estimated_memory": engine.memory.to_dict(),
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "num_prompt_tokens": scheduler.num_prompt_tokens,
        "num_prefix_cached_tokens": scheduler.num_prefix_cached_tokens,
        "num_preemptions": scheduler.num_preemptions,
        "steps_ahead": engine.ahead.stats(),
        "verify": {
            "startup": None if engine.verified is None else engine.verified.cost(),
            "live": None if engine.live_check is None else engine.live_check.stats(),
        },
        "runners": {phase: runner_stats(runner) for phase, runner in engine.runners.items()},
    }


def runner_stats(runner: Runner) -> dict[str, Any]:
    """Segments and breaks are those of the largest captured bucket."""
    reports = runner.explain()
    by_size = {key.size: report for key, report in reports.items()}
    largest = by_size[max(by_size)] if by_size else None
    return {
        "backend": runner.backend.name,
        "ladder": list(runner.spec.ladder),
        "captured_buckets": sorted(by_size),
        "num_segments": largest.num_segments if largest else 0,
        "num_breaks": largest.num_breaks if largest else 0,
        "pool_growth_bytes": sum(report.pool_growth_bytes for report in by_size.values()),
        **runner.stats.to_dict(),
    }
