"""What a verification costs: every captured bucket of a model against eager, in seconds and bytes.

    PYTHONPATH=src python3 benchmarks/verify_check.py --model qwen3-8b --load-format dummy --out result.json
    PYTHONPATH=src python3 benchmarks/verify_check.py --model smollm2 --device cpu --out result.json

Exit code 0 when every replay equals eager, else 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from breakgraph.bench.result import Metric, Result, Row, Shape, here, write_result
from breakgraph.engine.llm import LLM

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 4, "prefill_buckets": (16, 64),
        "decode_buckets": (1, 4), "num_gpu_blocks_override": 40,
    },
    "cuda": {
        "max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 64,
        "prefill_buckets": (128, 512, 2048, 8192), "decode_buckets": (1, 8, 64),
    },
}  # fmt: skip
"""An emulated capture takes seconds a bucket."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cuda", choices=tuple(SIZES))
    parser.add_argument("--prefill-backend", default="breakable")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("model", "load_format", "device", "prefill_backend", "attention")}
    started = time.perf_counter()
    with LLM(**options, **SIZES[args.device], use_tqdm=False) as llm:
        loading_sec = time.perf_counter() - started
        summary, stats = llm.verify(), llm.stats()
    for report in summary.reports:
        print(report)
    print(summary.line())
    rows = [
        Row(
            name=report.subject,
            params={"backend": stats["runners"][report.subject.split("[")[0]]["backend"]},
            metrics={
                "steps": Metric(value=len(report.steps), unit="count"),
                "wrong_steps": Metric(value=sum(not step.ok for step in report.steps), unit="count"),
                "rounding": Metric(value=max((s.rounding or 0.0 for s in report.steps), default=0.0), unit="ratio"),
            },
        )
        for report in summary.reports
    ]
    costs = {
        "verify": Metric(value=summary.seconds, unit="s"),
        "load_and_capture": Metric(value=loading_sec, unit="s"),
        "kept_for_comparing": Metric(value=summary.snapshot_bytes, unit="bytes"),
    }
    if summary.peak_bytes is not None:
        costs["peak"] = Metric(value=summary.peak_bytes, unit="bytes")
    rows.append(Row(name="cost", params={}, metrics=costs))
    run, where, versions = here(f"python3 benchmarks/verify_check.py {' '.join(sys.argv[1:-2])}", args.device)
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model=args.model, dtype=stats["dtype"]), rows=tuple(rows),
        notes=("each step is run eagerly twice on the padded bucket, replayed in poisoned memory, run eagerly with NaN "
               "in the padding rows, and run without padding",
               "peak is what the device had allocated beyond what was there before, eager activations included"),
    ))  # fmt: skip
    sys.exit(not summary.ok)


if __name__ == "__main__":
    main()
