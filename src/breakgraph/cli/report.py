"""`breakgraph report`: result files as tables or as a page with plots."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from breakgraph.errors import ConfigError
from breakgraph.report import FORMATS, render


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="show result files",
        description="Render result files as text, as Markdown, or as one HTML page with its plots in it.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what `breakgraph bench --out` wrote")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="terminal, markdown or html (needs "
                        "breakgraph[report])")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write there instead of standard output")


def run(args: argparse.Namespace) -> int:
    """All files are read before anything is written."""
    from breakgraph.bench.result import read_result

    text = render([read_result(path) for path in args.files], args.format)
    if args.out is None:
        print(text.rstrip("\n"))
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {args.out}: {error.strerror or error}") from error
    return 0
