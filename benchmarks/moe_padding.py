"""What padding costs a mixture of experts: replays of one bucket with fewer and fewer live tokens.

    PYTHONPATH=src python3 benchmarks/moe_padding.py --out result.json

A few layers of the qwen3-30b-a3b shape, random weights, once with experts that leave padding rows out and once with the
grouped matrix multiplication of transformers, which computes them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from breakgraph.attention import KVCacheBuffers, make_attention
from breakgraph.backends import make_backend
from breakgraph.bench.profiler import gpu_profile
from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.bench.timing import timed
from breakgraph.bench.workloads import BLOCK_SIZE, num_blocks, prefill_batch
from breakgraph.graph import PlanFamily
from breakgraph.models import load_model
from breakgraph.models.experts import LIVE_GROUPED_MM
from breakgraph.models.source import resolve_model
from breakgraph.runners import SlottedPrefillRunner, prefill_spec

NUM_LAYERS, SLOTS = 4, 4
BUCKETS = (512, 2048, 8192)


def few_layers(folder: Path) -> Path:
    """The preset's configuration with NUM_LAYERS layers."""
    config = resolve_model("qwen3-30b-a3b", load_format="dummy").config.to_dict()
    config |= {"num_hidden_layers": NUM_LAYERS, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows_of(experts: str, model: object, rounds: int) -> list[Row]:
    for layer in model.module.modules():  # type: ignore[attr-defined]
        if hasattr(layer, "config"):
            layer.config._experts_implementation = experts
    device, blocks = torch.device("cuda"), num_blocks([BUCKETS[-1]])
    attention = make_attention("triton", "cuda", torch.bfloat16, model.layers)  # type: ignore[attr-defined]
    attention.bind(KVCacheBuffers.allocate(model.layers, blocks, BLOCK_SIZE, torch.bfloat16, "cuda"))  # type: ignore[attr-defined]
    spec = prefill_spec(
        max_num_batched_tokens=BUCKETS[-1], max_num_seqs=SLOTS, max_model_len=BUCKETS[-1], num_blocks=blocks,
        block_size=BLOCK_SIZE, buckets=BUCKETS, request_slots=SLOTS,
    )  # fmt: skip

    def forward(fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return model.forward(fields["input_ids"], fields["positions"], fields["logits_rows"])  # type: ignore[attr-defined,no-any-return]

    rows = []
    with PlanFamily("cuda") as family:
        runner = SlottedPrefillRunner(spec, make_backend("full", family), forward, attention, "cuda")
        runner.allocate()
        runner.capture()
        for bucket, smaller in zip(BUCKETS, (0, *BUCKETS), strict=False):
            for live in (bucket, (bucket + smaller) // 2, smaller + 1):
                batch = prefill_batch(live, 1, model.vocab_size, live)  # type: ignore[attr-defined]

                def run(batch: object = batch) -> object:
                    return runner.run(batch)  # type: ignore[arg-type]

                walls = [timed(run, device)[0] for _ in range(rounds + 1)][1:]
                rows.append(Row(
                    name=f"{experts}, {live} of {bucket}",
                    params={"experts": experts, "bucket": bucket, "live": live, "layers": NUM_LAYERS},
                    metrics={"replay": Metric(value=statistics.median(walls), unit="ms"),
                             "gpu_busy": Metric(value=gpu_profile(run, device).busy_ms, unit="ms")},
                ))  # fmt: skip
                print(rows[-1].name, *(f"{k} {m.value:.3f} ms" for k, m in rows[-1].metrics.items()), flush=True)
        runner.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = load_model(few_layers(Path(folder)), dtype=torch.bfloat16, device="cuda", load_format="dummy")
        rows = [row for experts in (LIVE_GROUPED_MM, "grouped_mm") for row in rows_of(experts, model, args.rounds)]
    run, where, versions = here(f"python3 benchmarks/moe_padding.py {' '.join(sys.argv[1:-2])}".strip(), "cuda")
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model="qwen3-30b-a3b", dtype="bfloat16"), rows=tuple(rows),
        notes=(f"{NUM_LAYERS} of 48 layers; one request; full prefill graphs with {SLOTS} request slots",),
        excluded=("sampling", "tokenisation"),
    ))  # fmt: skip


if __name__ == "__main__":
    main()
