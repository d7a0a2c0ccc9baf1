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

    from breakgraph.engine.outputs import RequestOutput

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in one sentence why the sky is blue.",
)
MAX_TOKENS = 40
CAPTURED: dict[str, Any] = {"prefill_backend": "breakable", "decode_backend": "full"}
EAGER: dict[str, Any] = {"prefill_backend": "eager", "decode_backend": "eager"}
CPU_LADDERS: dict[str, Any] = {"prefill_buckets": (64, 128, 256), "decode_buckets": (1, 2, 3)}


@dataclass(frozen=True)
class DemoRun:
    """One pass over the questions. Times are wall clock, for the whole of it."""

    outputs: list[RequestOutput]
    stats: dict[str, Any]
    generate_sec: float

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
    if captured.stats["emulated"]:
        console.print("This is a CPU: graphs are emulated there. What is captured is real, the times claim no speed.")
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
        max_num_batched_tokens=256,
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


def comparison_table(captured: DemoRun, eager: DemoRun) -> Any:
    """A rich table: one row a run and phase."""
    from rich.table import Table

    table = Table("backend", "phase", "captured buckets", "eager steps", "tokens as eager")
    for name in ("segments", "breaks", "replays", "capture, s", "generate, s"):
        table.add_column(name, justify="right")
    for run_, answer in ((captured, "yes" if captured.token_ids == eager.token_ids else "NO"), (eager, "-")):
        for phase, runner in run_.stats["runners"].items():
            reasons = runner["num_eager_steps_by_reason"]
            table.add_row(
                runner["backend"],
                phase,
                ", ".join(map(str, runner["captured_buckets"])) or "-",
                ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "0",
                answer,
                str(runner["num_segments"]),
                str(runner["num_breaks"]),
                str(sum(runner["num_replays_by_bucket"].values())),
                f"{runner['capture_sec']:.2f}",
                f"{run_.generate_sec:.2f}",
            )
    return table
