"""`breakgraph capture`: captures a model's steps and prints what was captured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from breakgraph.cli import engine_options as options

if TYPE_CHECKING:
    from breakgraph.engine.llm import LLM
    from breakgraph.engine.memory_report import MemoryReport
    from breakgraph.graph import PlanReport, ShapeKey

MIB = 1 << 20


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "capture",
        help="capture a model and show what was captured",
        description="Capture all buckets of a model and show segments, breaks, memory and time of each.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--explain", action="store_true", help="also print the largest plan of each phase, step by step"
    )
    parser.add_argument("--memory", action="store_true", help="also print what each bucket and the whole engine take")
    parser.add_argument(
        "--trace", metavar="FILE", help="also write one replay of the largest prefill bucket as a trace for Perfetto"
    )
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Prints one line a bucket, then totals."""
    from breakgraph.engine.llm import LLM

    with LLM(**options.engine_options(args)) as llm:
        print_captured(llm)
        if args.memory:
            print_memory(llm.memory_report())
        if args.explain:
            for report in _largest(llm.explain()):
                print(f"\n{report}")
        if args.trace:
            print_trace(llm, args.trace)
    return 0


def print_trace(llm: LLM, path: str) -> None:
    """Writes the file and says how to open it."""
    from breakgraph.bench.trace import export_runner

    num_steps = export_runner(llm.engine.runners["prefill"], path)
    print(f"\ntrace of {num_steps} steps in {path}: open it at https://ui.perfetto.dev or in chrome://tracing")


def print_captured(llm: LLM) -> None:
    """The table of all plans of an LLM."""
    from rich.console import Console
    from rich.table import Table

    stats = llm.stats()
    console = Console()
    emulated = " (emulated: works, and claims no speed)" if stats["emulated"] else ""
    console.print(f"{stats['model']}, {stats['dtype']}, {stats['device']}{emulated}", highlight=False)
    table = Table("phase", "backend", box=None, pad_edge=False)
    for name in ("bucket", "segments", "breaks", "nodes", "capture s"):
        table.add_column(name, justify="right")
    for key, report in llm.explain().items():
        num_nodes = sum(step.num_nodes for step in report.steps)
        counts = (key.size, report.num_segments, report.num_breaks, num_nodes)
        table.add_row(
            key.phase,
            stats["runners"][key.phase]["backend"],
            *map(str, counts),
            f"{report.capture_sec:.3f}",
        )
    console.print(table)
    for phase, runner in stats["runners"].items():
        if not runner["captured_buckets"]:
            console.print(f"{phase}: nothing captured, backend {runner['backend']}", highlight=False)
    console.print(
        f"graph pool {stats['pool_bytes'] / MIB:.1f} MiB, KV cache {stats['kv_cache_bytes'] / MIB:.1f} MiB in "
        f"{stats['num_kv_blocks']} blocks",
        highlight=False,
    )


def print_memory(report: MemoryReport) -> None:
    """Two tables in MiB: buckets, and what is held in all."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("\nmemory of the buckets, MiB")
    buckets = Table("phase", box=None, pad_edge=False)
    for name in ("bucket", "activations", "boundaries", "outputs", "pool growth", "driver"):
        buckets.add_column(name, justify="right")
    for bucket in report.buckets:
        sizes = (
            bucket.activation_bytes,
            bucket.boundary_bytes,
            bucket.output_bytes,
            bucket.pool_growth_bytes,
            bucket.driver_bytes,
        )
        buckets.add_row(bucket.phase, str(bucket.bucket), *map(_mib, sizes))
    console.print(buckets)
    estimate = report.estimate
    console.print("\nmemory in all, MiB")
    totals = Table("", box=None, pad_edge=False)
    totals.add_column("taken", justify="right")
    totals.add_column("estimated", justify="right")
    rows = (
        ("pool, shared by all buckets", report.pool_bytes, estimate.pool_bytes),
        ("output buffer, shared by all buckets", report.output_bytes, estimate.output_bytes),
        ("static input buffers", report.input_bytes, estimate.input_bytes),
        ("driver, for the graphs", report.driver_bytes, estimate.driver_bytes),
        ("graphs in all", report.graph_bytes, estimate.graph_bytes),
    )
    for name, taken, estimated in rows:
        totals.add_row(name, _mib(taken), _mib(estimated))
    totals.add_row("KV cache", _mib(report.kv_cache_bytes), "")
    totals.add_row("weights", _mib(report.weight_bytes), "")
    totals.add_row("a step, beside the graphs", "", _mib(estimate.step_bytes) if not report.emulated else "?")
    totals.add_row("activation peak of the largest eager step", _mib(estimate.activation_peak_bytes), "")
    totals.add_row("activation peak avoided", _mib(estimate.activation_peak_avoided_bytes), "")
    console.print(totals)
    if report.emulated:
        console.print("? is not measured on the emulated device, whose sizes are its own", highlight=False)


def _mib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / MIB:.2f}"


def _largest(reports: dict[ShapeKey, PlanReport]) -> list[PlanReport]:
    """Of each phase."""
    sizes: dict[str, ShapeKey] = {}
    for key in reports:
        if key.phase not in sizes or key.size > sizes[key.phase].size:
            sizes[key.phase] = key
    return [reports[key] for key in sizes.values()]
