"""`breakgraph demo`: a small real model, captured, beside the same model run eagerly."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from breakgraph.cli import engine_options as options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from breakgraph.engine.outputs import RequestOutput

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in one sentence why the sky is blue.",
)
MAX_TOKENS = 40
CAPTURED: dict[str, Any] = {"prefill_backend": "breakable", "decode_backend": "full"}
EAGER: dict[str, Any] = {"prefill_backend": "eager", "decode_backend": "eager"}
CPU_LADDERS: dict[str, Any] = {"prefill_buckets": (64, 128), "decode_buckets": (1, 2, 3)}


@dataclass(frozen=True)
class DemoRun:
    """One pass over the questions. Times are wall clock."""

    outputs: list[RequestOutput]
    stats: dict[str, Any]
    generate_sec: float

    @property
    def capture_sec(self) -> float:
        return sum(runner["capture_sec"] for runner in self.stats["runners"].values())

    @property
    def token_ids(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="chat with SmolLM2, captured and eager",
        description="Answer a few questions with SmolLM2-135M, once captured and once eagerly, and compare the two.",
        allow_abbrev=False,
    )
    parser.add_argument("--cache-dir", help=f"where the model is kept (or set {options.CACHE_VARIABLE})")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N, or cpu (emulated, not fast)")


def run(args: argparse.Namespace) -> int:
    """0 when the captured run gives the eager run's tokens, 1 when it does not."""
    from rich.console import Console

    console = Console()
    captured = _run("captured", CAPTURED, args, console)
    for question, output in zip(QUESTIONS, captured.outputs, strict=True):
        console.print(f"\n[bold]{question}[/bold]")
        console.print(output.outputs[0].text.strip(), markup=False, highlight=False)
    console.print()
    eager = _run("eager", EAGER, args, console)
    is_equal = captured.token_ids == eager.token_ids
    console.print(comparison_table(captured, eager))
    for name, demo_run in (("captured", captured), ("eager", eager)):
        console.print(
            f"{name}: capture {demo_run.capture_sec:.1f} s, answers {demo_run.generate_sec:.1f} s", highlight=False
        )
    if captured.stats["emulated"]:
        console.print("This is a CPU: graphs are emulated. What they hold and compute is real; no speed is claimed.")
    return 0 if is_equal else 1


def _run(name: str, backends: dict[str, Any], args: argparse.Namespace, console: Console) -> DemoRun:
    from breakgraph.engine.config import Hardware
    from breakgraph.engine.llm import LLM
    from breakgraph.engine.sampling import SamplingParams

    console.print(f"[dim]{name}: loading SmolLM2-135M[/dim]")
    ladders = CPU_LADDERS if Hardware.detect(args.device).device.type == "cpu" else {}
    with LLM(
        options.DEFAULT_MODEL,
        # Padding changes how a product is rounded; in float32 that does not change the likeliest token.
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=128,
        max_num_seqs=len(QUESTIONS),
        device=args.device,
        cache_dir=args.cache_dir or os.environ.get(options.CACHE_VARIABLE) or None,
        **backends,
        **ladders,
    ) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        started = time.perf_counter()
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        return DemoRun(outputs, llm.stats(), time.perf_counter() - started)


def comparison_table(captured: DemoRun, eager: DemoRun) -> Table:
    """One row a run and phase, narrow enough for a terminal of 80 columns."""
    from rich.table import Table

    table = Table("phase", "backend", box=None, pad_edge=False, collapse_padding=True)
    for name in ("segments", "breaks", "buckets", "capture", "replays", "equal"):
        table.add_column(name, justify="right")
    table.add_column("eager steps")
    for demo_run, as_eager in ((captured, "yes" if captured.token_ids == eager.token_ids else "NO"), (eager, "-")):
        for phase, runner in demo_run.stats["runners"].items():
            reasons = runner["num_eager_steps_by_reason"]
            table.add_row(
                phase,
                runner["backend"],
                str(runner["num_segments"]),
                str(runner["num_breaks"]),
                _buckets(runner["captured_buckets"]),
                f"{runner['capture_sec']:.1f}s",
                str(sum(runner["num_replays_by_bucket"].values())),
                as_eager,
                "\n".join(f"{count} {reason}" for reason, count in reasons.items()) or "0",
            )
    return table


def _buckets(sizes: list[int]) -> str:
    if len(sizes) > 4:
        return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})"
    return ",".join(map(str, sizes)) or "-"
