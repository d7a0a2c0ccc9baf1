"""`breakgraph capture`: captures a model's steps and prints what was captured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from breakgraph.cli import engine_options as options

if TYPE_CHECKING:
    from breakgraph.engine.llm import LLM
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
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Prints one line a bucket, then totals."""
    from breakgraph.engine.llm import LLM

    with LLM(**options.engine_options(args)) as llm:
        print_captured(llm)
        if args.explain:
            for report in _largest(llm.explain()):
                print(f"\n{report}")
    return 0


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


def _largest(reports: dict[ShapeKey, PlanReport]) -> list[PlanReport]:
    """Of each phase."""
    sizes: dict[str, ShapeKey] = {}
    for key in reports:
        if key.phase not in sizes or key.size > sizes[key.phase].size:
            sizes[key.phase] = key
    return [reports[key] for key in sizes.values()]
