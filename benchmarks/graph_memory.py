"""Memory with graphs and without, on a mixture-of-experts shape of 78 layers with random weights.

    PYTHONPATH=src python3 benchmarks/graph_memory.py --out graph_memory.json

Each arm is a process of its own with the same weights, the same KV cache and the same steps, largest first and then
ragged ones: `eager` captures nothing, `graphs` captures buckets through the chunk size, `short` (with --short) stops at
a quarter of it. What the device has in use is `mem_get_info`'s word; the part that torch's allocator does not hold is
the driver's. With --model and --device cpu the script runs on the emulated device, where none of that is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.engine.config import EngineConfig
from breakgraph.engine.engine import Engine
from breakgraph.engine.loading import load_engine
from breakgraph.runners import StepBatch, default_ladder
from breakgraph.runners.spec import last_rows

BLOCK, MAX_SEQS = 16, 16
SHAPE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "bfloat16",
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "first_k_dense_replace": 3, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "n_routed_experts": 12, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "use_qk_norm": True, "partial_rotary_factor": 0.5,
    "vocab_size": 154880, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
DECODE_BUCKETS = (4, 8, 16)
"""With the 39 of the default prefill ladder for 8192 tokens: 42."""


def config_for(arm: str, args: argparse.Namespace) -> EngineConfig:
    backends = {"prefill_backend": "eager", "decode_backend": "eager"} if arm == "eager" else {}
    prefill = default_ladder(args.chunk)
    if arm == "short":
        prefill = tuple(size for size in prefill if size <= args.chunk // 4)
    return EngineConfig(
        model=args.model, load_format="dummy", device=args.device, max_model_len=args.chunk,
        max_num_batched_tokens=args.chunk, max_num_seqs=MAX_SEQS, block_size=BLOCK,
        num_gpu_blocks_override=args.chunk // BLOCK + MAX_SEQS + 1, prefill_buckets=prefill,
        decode_buckets=DECODE_BUCKETS, **backends,
    )  # fmt: skip


def ragged_step(rng: random.Random, num_tokens: int, vocab: int) -> StepBatch:
    """Prompts of `num_tokens` in all, cut at random into at most `MAX_SEQS` requests on blocks of their own."""
    cuts = sorted(rng.sample(range(1, num_tokens), min(rng.randrange(MAX_SEQS), num_tokens - 1)))
    q_lens = [b - a for a, b in zip([0, *cuts], [*cuts, num_tokens], strict=True)]
    free = iter(range(1, 1 << 30))
    tables = [[next(free) for _ in range(-(-q_len // BLOCK))] for q_len in q_lens]
    positions = [p for q_len in q_lens for p in range(q_len)]
    slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t, n in zip(tables, q_lens, strict=True) for p in range(n)]
    return StepBatch(
        input_ids=[rng.randrange(vocab) for _ in positions], positions=positions, slot_mapping=slots, q_lens=q_lens,
        seq_lens=q_lens, block_tables=tables, logits_rows=last_rows(q_lens),
    )  # fmt: skip


def serve(engine: Engine, chunk: int) -> None:
    """The same steps in every arm: the largest ones, then sizes as they come, then the largest again."""
    rng = random.Random(0)
    sizes = [chunk, chunk, *(rng.randint(2, chunk) for _ in range(20)), chunk]
    with torch.inference_mode():
        for size in sizes:
            logits = engine.runners["prefill"].run(ragged_step(rng, size, engine.facts.vocab_size))
        assert logits.isfinite().all(), "the logits are not finite: the steps would mean nothing"


def device_bytes() -> dict[str, int]:
    """What the device has in use, and what of it is not torch's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"used": total - free, "beyond_torch": total - free - torch.cuda.memory_reserved()}


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Plain data of one arm, in bytes and seconds."""
    start = time.perf_counter()
    engine = load_engine(config_for(arm, args))
    done: dict[str, Any] = {"arm": arm, "load_sec": time.perf_counter() - start}
    is_cuda = args.device != "cpu"
    if is_cuda:
        torch.cuda.empty_cache()
        done["loaded"] = device_bytes()
    start = time.perf_counter()
    engine.capture()
    done["capture_sec"] = time.perf_counter() - start
    if is_cuda:
        done["captured"] = device_bytes()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    serve(engine, args.chunk)
    if is_cuda:
        torch.cuda.synchronize()
        done["step_peak"] = torch.cuda.max_memory_allocated() - held
        done["served"] = device_bytes()
        done["reserved_peak"] = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        done["idle"] = device_bytes()
    done["eager_steps"] = sum(engine.runners["prefill"].stats.eager_steps.values())
    done["report"] = engine.memory_report().to_dict()
    engine.close()
    return done


def arm_row(done: dict[str, Any]) -> Row:
    report = done["report"]
    sizes = {
        "weights": report["weight_bytes"], "kv_cache": report["kv_cache_bytes"], "pool": report["pool_bytes"],
        "outputs": report["output_bytes"], "inputs": report["input_bytes"],
    }  # fmt: skip
    if "idle" in done:
        sizes |= {
            "used_after_loading": done["loaded"]["used"], "used_after_capture": done["captured"]["used"],
            "used_after_serving": done["served"]["used"], "used_idle": done["idle"]["used"],
            "beyond_torch_after_loading": done["loaded"]["beyond_torch"],
            "beyond_torch_idle": done["idle"]["beyond_torch"],
            # At the largest step, with the least that torch could hold for it.
            "used_at_peak": done["idle"]["used"] + done["step_peak"], "step_peak": done["step_peak"],
        }  # fmt: skip
    metrics = {name: Metric(value=value, unit="bytes") for name, value in sizes.items()}
    metrics |= {
        "plans": Metric(value=len(report["buckets"]), unit="count"),
        "eager_steps": Metric(value=done["eager_steps"], unit="count"),
        "load": Metric(value=done["load_sec"], unit="s"),
        "capture": Metric(value=done["capture_sec"], unit="s"),
    }
    return Row(name=f"arm {done['arm']}", params={"arm": done["arm"]}, metrics=metrics)


def graphs_row(done: dict[str, Any]) -> Row:
    """What capturing took, part by part, against what the largest bucket needs."""
    report, estimate = done["report"], done["report"]["estimate"]
    activations = max(bucket["activation_bytes"] for bucket in report["buckets"])
    needed = activations + report["output_bytes"]
    sizes = {
        "largest_activations": activations, "pool": report["pool_bytes"], "outputs": report["output_bytes"],
        "inputs": report["input_bytes"], "estimated_pool": estimate["pool_bytes"],
    }  # fmt: skip
    ratios = {"pool_and_outputs_over_needed": (report["pool_bytes"] + report["output_bytes"]) / needed}
    if "captured" in done:
        taken = done["captured"]["used"] - done["loaded"]["used"]
        driver = done["captured"]["beyond_torch"] - done["loaded"]["beyond_torch"]
        sizes |= {
            "taken_by_capture": taken, "driver": driver, "torch": taken - driver,
            "driver_by_plan": report["driver_bytes"], "estimated_driver": estimate["driver_bytes"],
            "activation_peak_eager": estimate["activation_peak_bytes"],
            "activation_peak_avoided": estimate["activation_peak_avoided_bytes"],
            "estimated_step": estimate["step_bytes"],
        }  # fmt: skip
        ratios |= {"torch_over_needed": (taken - driver) / needed, "taken_over_needed": taken / needed}
    metrics = {name: Metric(value=value, unit="bytes") for name, value in sizes.items()}
    metrics |= {name: Metric(value=value, unit="ratio") for name, value in ratios.items()}
    return Row(name=f"graph memory, {done['arm']}", params={"arm": done["arm"]}, metrics=metrics)


def bucket_rows(done: dict[str, Any]) -> list[Row]:
    names = ("activation_bytes", "boundary_bytes", "output_bytes", "pool_growth_bytes", "driver_bytes")
    return [
        Row(
            name=f"{bucket['phase']}[{bucket['bucket']}], {done['arm']}",
            params={"arm": done["arm"], "phase": bucket["phase"], "bucket": bucket["bucket"]},
            metrics={n: Metric(value=bucket[n], unit="bytes") for n in names if bucket[n] is not None},
        )
        for bucket in done["report"]["buckets"]
    ]


def run_in_process(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "arm.json"
        options = ["--model", args.model, "--device", args.device, "--chunk", str(args.chunk), "--out", str(out)]
        subprocess.run([sys.executable, __file__, "--arm", arm, *options], check=True)
        return dict(json.loads(out.read_text()))


def show(row: Row) -> None:
    print(row.name)
    for name, metric in row.metrics.items():
        value = f"{metric.value / 2**20:12.1f} MiB" if metric.unit == "bytes" else f"{metric.value:12.3f} {metric.unit}"
        print(f"  {name:32}{value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with a config.json, in place of the shape above")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of the largest step")
    parser.add_argument("--short", action="store_true", help="also a ladder that ends at a quarter of the chunk")
    parser.add_argument("--arm", choices=("eager", "graphs", "short"), help="run one arm here and write its raw data")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.arm:
        args.out.write_text(json.dumps(run_arm(args.arm, args)))
        return
    model: dict[str, Any] | str = args.model or {k: v for k, v in SHAPE.items() if k != "architectures"}
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
            args.model = folder
        arms = [run_in_process(arm, args) for arm in ("eager", "graphs", *(["short"] if args.short else []))]
    rows = [arm_row(done) for done in arms]
    captured = [done for done in arms if done["report"]["buckets"]]
    rows += [graphs_row(done) for done in captured]
    for row in rows:
        show(row)
    if args.device == "cpu":
        print("emulated: sizes are the emulation's own; driver, device and eager peaks are not measured")
    else:
        eager, graphs = (row.metrics["used_at_peak"].value for row in rows[:2])
        served = [row.metrics["used_after_serving"].value for row in rows[:2]]
        print(f"at the largest step: graphs {graphs / 2**20:.1f} MiB, no graphs {eager / 2**20:.1f} MiB")
        print(f"after serving: graphs {served[1] / 2**20:.1f} MiB, no graphs {served[0] / 2**20:.1f} MiB")
    run, where, versions = here(f"python3 benchmarks/graph_memory.py {' '.join(sys.argv[1:-2])}".strip(), args.device)
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model=model, dtype="bfloat16"),
        rows=(*rows, *(row for done in captured for row in bucket_rows(done))),
        notes=("used: total less free memory of mem_get_info, other processes included; beyond_torch: the part that "
               "torch's allocator does not hold",
               "used_at_peak: used_idle plus what the largest step allocates beside it; used_after_serving includes "
               "what torch keeps for reuse"),
        excluded=("sampling", "tokenisation"),
    ))  # fmt: skip


if __name__ == "__main__":
    main()
