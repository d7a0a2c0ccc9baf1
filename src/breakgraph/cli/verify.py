"""`breakgraph verify`: captures a model and compares every bucket's replays with eager runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from breakgraph.cli import engine_options as options

EXIT_DIFFERENT = 1


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="compare replays with eager runs",
        description="Capture all buckets of a model and compare their replays, in poisoned memory, with eager runs of "
        "random steps. Exit code 0: all equal, 1: something differs, 2: refused.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: every step, and what it cost")
    options.add_engine_options(parser, without=("verify",))


def run(args: argparse.Namespace) -> int:
    """Prints what was found; a wrong bucket with the place where it begins to differ."""
    from breakgraph.engine.llm import LLM

    with LLM(**options.engine_options(args)) as llm:
        summary = llm.verify()
    if args.json:
        print(json.dumps(summary.to_dict()))
    else:
        for report in summary.reports:
            print(report)
        print(summary.line())
    return 0 if summary.ok else EXIT_DIFFERENT
