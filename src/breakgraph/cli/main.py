"""The `breakgraph` command: finds the subcommand, runs it, turns expected failures into one line.

A subcommand is a module of this package that imports only the standard library at its top and has
`add_parser(subparsers)` and `run(args) -> int` (the exit code). Its name stands in COMMANDS.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from breakgraph import __version__
from breakgraph.errors import BreakgraphError

COMMANDS = ("bench", "capture", "demo", "env", "generate", "report", "serve", "verify")

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
"""As shells report the signal that others end by."""


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
    """Run one command and return its exit code: 2 when breakgraph refuses, 130 when interrupted, 141 when whoever read
    the output (``head``, say) has gone.

    Args:
        argv: arguments without the program name; None reads the process's own.
    """
    args = build_parser().parse_args(argv)
    try:
        code = int(_command(args.command).run(args))
        sys.stdout.flush()
        return code
    except BreakgraphError as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"breakgraph: {message}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return EXIT_PIPE_CLOSED


def _reader_has_gone() -> bool:
    """Whether the output is a pipe that nobody reads. What is left of it then goes nowhere, at exit too."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _command(name: str) -> ModuleType:
    return import_module(f"breakgraph.cli.{name}")
