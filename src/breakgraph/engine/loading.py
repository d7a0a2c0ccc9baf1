"""From a config to an engine, ready to capture. What was made is closed again when a later step fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from breakgraph.attention import AttentionBackend, KVCacheBuffers, make_attention
from breakgraph.attention.kv_buffers import kv_bytes_per_block
from breakgraph.backends import backend_class, make_backend
from breakgraph.engine.config import EngineConfig, Hardware, ModelLimits, resolve
from breakgraph.engine.device_memory import MemoryPlan, free_bytes, kv_budget, log_plan, measure_sampler, mib
from breakgraph.engine.engine import Engine, ModelFacts
from breakgraph.engine.kv_cache import BlockAllocator, KVDemand, choose_num_blocks
from breakgraph.engine.sampler import Sampler
from breakgraph.engine.scheduler import Scheduler
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily, choose_runs
from breakgraph.runners import (
    PhaseMemory,
    decode_runner_class,
    decode_spec,
    prefill_runner_class,
    prefill_spec,
    unused_buckets,
)
from breakgraph.runners.base import Forward, Runner

if TYPE_CHECKING:
    from breakgraph.models import HFModel

logger = logging.getLogger(__name__)


def load_engine(config: EngineConfig) -> Engine:
    """Loads the model, measures what its steps need, sizes and allocates the KV cache. Keeps no capture.

    Raises ConfigError (or one of its kinds) for whatever the config asks that cannot be had.
    """
    from breakgraph.models import fuse, load_model, load_tokenizer, resolve_model

    _check_backends(config)
    source = resolve_model(config.model, load_format=config.load_format, cache_dir=config.cache_dir)
    dtype_name = None if source.dtype is None else str(source.dtype).removeprefix("torch.")
    config = resolve(config, Hardware.detect(config.device), ModelLimits(source.max_position, dtype_name))
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    model = load_model(source, dtype=dtype, device=device, seed=config.seed)
    if config.fusion == "inductor":
        fuse(model)
    backends = {"prefill": config.prefill_backend, "decode": config.decode_backend}
    in_graph = [phase for phase, name in backends.items() if backend_class(name).records_breaks]
    attention = make_attention(
        config.attention, device, dtype, model.layers, block_size=config.block_size, in_graph=in_graph
    )
    memory = _measure(config, model, attention)
    with ExitStack() as on_failure:
        # After measuring, so that it gets the stream which libraries keep a workspace for by now.
        family = PlanFamily(device)
        on_failure.callback(family.close)
        kv = _allocate_kv(config, model, memory)
        attention.bind(kv)
        runners = _make_runners(config, model, attention, family, kv.num_blocks)
        for runner in runners:
            on_failure.callback(runner.close)
            runner.allocate()
            _warn_of_ladder(runner, memory)
        engine = Engine(
            config=config,
            facts=ModelFacts(model.vocab_size, model.max_position, frozenset(model.eos_token_ids), model.num_bytes),
            tokenizer=load_tokenizer(source),
            family=family,
            kv=kv,
            runners={runner.spec.phase: runner for runner in runners},
            scheduler=_make_scheduler(config, kv.num_blocks),
            sampler=Sampler(device, config.seed),
            memory=memory,
            model_tensors=[*model.module.parameters(), *model.module.buffers()],
        )
        on_failure.pop_all()
    return engine


def _check_backends(config: EngineConfig) -> None:
    """Before the weights are read."""
    prefill, decode = backend_class(config.prefill_backend), backend_class(config.decode_backend)
    if config.prefill_request_slots is not None and not (prefill.records_breaks or prefill.chooses):
        raise ConfigError(
            f"prefill_request_slots={config.prefill_request_slots} is for prefill_backend='full' or 'auto'; with "
            f"{config.prefill_backend!r} a bucket takes any number of requests, so leave it out"
        )
    compiling = next((backend.name for backend in (prefill, decode) if backend.compiles), None)
    if config.fusion != "none" and compiling is not None:
        raise ConfigError(
            f"fusion={config.fusion!r} compiles the layers, and backend {compiling!r} traces the whole forward, which "
            "then finds them compiled; use fusion='none' with it"
        )


def _measure(config: EngineConfig, model: HFModel, attention: AttentionBackend) -> MemoryPlan:
    """Runs and captures the largest steps on a KV cache of nothing but the reserved block."""
    device, sizes = torch.device(config.device), config.sizes
    attention.bind(KVCacheBuffers.allocate(model.layers, 1, config.block_size, model.dtype, device))
    bytes_per_request = _kv_demand(config, model).blocks_per_seq * _kv_demand(config, model).bytes_per_block
    # No more long requests than could be in memory, however little else there is.
    num_long_reqs = max(1, min(sizes.max_num_seqs, free_bytes(device) // bytes_per_request))

    def measure_runner(index: int) -> PhaseMemory:
        with PlanFamily(device) as family, ExitStack() as stack:
            runner = _make_runners(config, model, attention, family, num_blocks=1)[index]
            stack.callback(runner.close)
            runner.allocate()
            return runner.measure_memory(num_long_reqs)

    phases = measure_runner(0), measure_runner(1)
    pool_runs, pool_bytes = _cut_pool(config, model, attention, phases)
    plan = MemoryPlan(
        phases=phases,
        sampler=measure_sampler(device, sizes.max_num_seqs, model.vocab_size, model.dtype),
        pool_runs=pool_runs,
        pool_bytes=pool_bytes,
    )
    log_plan(plan)
    return plan


def _cut_pool(
    config: EngineConfig, model: HFModel, attention: AttentionBackend, phases: Sequence[PhaseMemory]
) -> tuple[tuple[int, ...], int]:
    """The runs to reserve in the pool, and what it holds then: several runs only if they are seen to need less than the
    largest bucket of any phase took alone."""
    alone = max(phase.pool_bytes for phase in phases)
    runs = choose_runs([trace for phase in phases for trace in phase.traces])
    if len(runs) <= 1:
        logger.info("pool: %s, reserved in one piece: %s", mib(alone), mib(sum(runs)))
        return runs, alone
    with PlanFamily(torch.device(config.device)) as family, ExitStack() as stack:
        family.reserve(*runs)
        for runner in _make_runners(config, model, attention, family, num_blocks=1):
            stack.callback(runner.close)
            runner.allocate()
            runner.capture_largest()
        taken = family.pool_bytes
    logger.info("pool cut into %s: %s, without %s", ", ".join(map(mib, runs)), mib(taken), mib(alone))
    return (runs, taken) if taken < alone else ((alone,), alone)


def _kv_demand(config: EngineConfig, model: HFModel) -> KVDemand:
    return KVDemand(
        bytes_per_block=kv_bytes_per_block(model.layers, config.block_size, model.dtype),
        block_size=config.block_size,
        max_model_len=config.sizes.max_model_len,
        max_num_seqs=config.sizes.max_num_seqs,
        fill_memory=config.enable_prefix_caching and torch.device(config.device).type == "cuda",
    )


def _allocate_kv(config: EngineConfig, model: HFModel, memory: MemoryPlan) -> KVCacheBuffers:
    device, available = torch.device(config.device), 0
    if config.num_gpu_blocks_override is None:
        available = kv_budget(device, config.gpu_memory_utilization, memory, num_tensors=2 * len(model.layers))
    num_blocks = choose_num_blocks(_kv_demand(config, model), available, config.num_gpu_blocks_override)
    return KVCacheBuffers.allocate(model.layers, num_blocks, config.block_size, model.dtype, device)


def _warn_of_ladder(runner: Runner, memory: MemoryPlan) -> None:
    """Says what an explicit ladder costs: too short, it keeps the memory of eager steps; too long, captures."""
    spec, option = runner.spec, f"{runner.spec.phase}_buckets"
    if not runner.backend.captures:
        return
    if spec.ladder[-1] < spec.max_size:
        peak = next(phase.eager.allocated_bytes for phase in memory.phases if phase.phase == spec.phase)
        kept = "an activation peak (not measured on the emulated device)" if peak is None else (
            f"an activation peak of {peak / 2**30:.2f} GiB")  # fmt: skip
        logger.warning(
            "%s: the largest bucket is %d, the scheduler can send %d: larger steps run eagerly, are counted, and keep "
            "%s beside the graphs; end the list with %d",
            option, spec.ladder[-1], spec.max_size, kept, spec.max_size,
        )  # fmt: skip
    unused = unused_buckets(spec.ladder, spec.max_size)
    if unused:
        logger.warning("%s: buckets %s are never used: the scheduler sends %d at most", option, unused, spec.max_size)


def _make_runners(
    config: EngineConfig, model: HFModel, attention: AttentionBackend, family: PlanFamily, num_blocks: int
) -> tuple[Runner, ...]:
    sizes = config.sizes
    backends = make_backend(config.prefill_backend, family), make_backend(config.decode_backend, family)
    has_slots = backends[0].records_breaks or backends[0].chooses
    prefill = prefill_spec(
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        buckets=config.prefill_buckets,
        request_slots=(config.prefill_request_slots or sizes.max_num_seqs) if has_slots else None,
    )
    decode = decode_spec(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        buckets=config.decode_buckets,
    )
    forward = _forward_of(model)
    device = torch.device(config.device)
    return (
        prefill_runner_class(backends[0])(prefill, backends[0], forward, attention, device),
        decode_runner_class(backends[1])(decode, backends[1], forward, attention, device),
    )


def _forward_of(model: HFModel) -> Forward:
    def forward(fields: Mapping[str, Tensor]) -> Tensor:
        return model.forward(fields["input_ids"], fields["positions"], fields["logits_rows"])

    return forward


def _make_scheduler(config: EngineConfig, num_blocks: int) -> Scheduler:
    sizes = config.sizes
    return Scheduler(
        BlockAllocator(num_blocks),
        block_size=config.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
