"""The `breakgraph` command: finds the subcommand, runs it, turns expected failures into one line.

A subcommand is a module of this package that imports only the standard library at its top and has
`add_parser(subparsers)` and `run(args) -> int` (the exit code). Its name stands in COMMANDS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from breakgraph import __version__
from breakgraph.errors import BreakgraphError

COMMANDS = ("bench", "capture", "demo", "env", "generate", "report", "serve", "verify")

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; imports no torch."""
    parser = argparse.ArgumentParser(
        prog="breakgraph", description="Breakable CUDA graphs for PyTorch models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"breakgraph {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in COMMANDS:
        _command(name).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 when breakgraph refuses, 130 when interrupted.

    Args:
        argv: arguments without the program name; None reads the process's own.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(_command(args.command).run(args))
    except BreakgraphError as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"breakgraph: {message}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _command(name: str) -> ModuleType:
    return import_module(f"breakgraph.cli.{name}")
