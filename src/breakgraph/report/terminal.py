"""Results as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from breakgraph.bench.result import Result
from breakgraph.report.tables import Table, facts, heading, tables

_WIDTH = 1000
"""Lines are never folded here: a narrow terminal does that, and a file should have one line a row."""


def render(results: Sequence[Result]) -> str:
    """Headings, facts and tables, without the details."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=_WIDTH, color_system=None, force_terminal=False)
    for result in results:
        console.print(Text(f"{heading(result)}\n"))
        for table in tables(result):
            if not table.details:
                _print(console, table)
        for name, value in facts(result):
            console.print(Text(f"{name}: {value}"))
        console.print()
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def _print(console: Console, table: Table) -> None:
    console.print(Text(table.title + (f" ({table.caption})" if table.caption else "")))
    made = RichTable(box=None, pad_edge=False)
    for name, right in zip(table.columns, table.is_number, strict=True):
        made.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for row in table.rows:
        made.add_row(*map(Text, row))
    console.print(made)
    console.print()
