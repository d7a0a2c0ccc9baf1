"""Results as Markdown: the tables of README.md come from here."""

from __future__ import annotations

from collections.abc import Sequence

from breakgraph.bench.result import Result
from breakgraph.report.tables import Table, facts, heading, tables


def render(results: Sequence[Result]) -> str:
    """A heading a result, its facts, its tables."""
    return "\n".join(_result(result) for result in results)


def _result(result: Result) -> str:
    lines = [f"## {_escape(heading(result))}", ""]
    lines += [f"- {name}: {_code(value) if name == 'command' else _escape(value)}" for name, value in facts(result)]
    for table in tables(result):
        lines += ["", f"### {_escape(table.title)}", ""]
        lines += [*([_escape(table.caption), ""] if table.caption else []), *table_lines(table)]
    return "\n".join(lines) + "\n"


def table_lines(table: Table) -> list[str]:
    """A pipe table, numbers to the right."""
    rule = "|" + "|".join("---:" if right else "---" for right in table.is_number) + "|"
    return [_row(table.columns), rule, *map(_row, table.rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(text: str) -> str:
    for character in "\\|<>*_`[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").split()) + "`"
