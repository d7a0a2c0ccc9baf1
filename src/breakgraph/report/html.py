"""Results as one HTML page that needs nothing else: style and plots are in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from breakgraph.bench.result import Result
from breakgraph.report.plots import Plot, plots
from breakgraph.report.tables import Table, facts, heading, tables

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2230; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 3rem; border-top: 1px solid #d5d9e2; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #e6e9ef; text-align: left; white-space: nowrap; }
th { font-weight: 600; color: #4a5266; } .number { text-align: right; }
.wide { overflow-x: auto; } figure { margin: 1.2rem 0; } figcaption, .caption { color: #4a5266; max-width: 60rem; }
figure svg { max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: #4a5266; } dd { margin: 0; overflow-wrap: anywhere; } summary { cursor: pointer; }
"""


def render(results: Sequence[Result]) -> str:
    """The page.

    Raises:
        ConfigError: matplotlib, which draws the plots, is not installed.
    """
    body = "\n".join(_result(result) for result in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>breakgraph results</title><style>{_STYLE}</style></head>\n<body><h1>breakgraph results</h1>\n{body}\n"
        "</body></html>\n"
    )


def _result(result: Result) -> str:
    parts = [f"<section><h2>{escape(heading(result))}</h2>"]
    parts += [_figure(plot) for plot in plots(result)]
    parts += [_table(table) for table in tables(result)]
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(result))
    return "\n".join([*parts, f"<h3>how it was measured</h3><dl>{items}</dl></section>"])


def _figure(plot: Plot) -> str:
    return f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    head = "".join(map(_cell, ["th"] * len(table.columns), table.columns, table.is_number))
    rows = "".join(
        "<tr>" + "".join(map(_cell, ["td"] * len(row), row, table.is_number)) + "</tr>\n" for row in table.rows
    )
    body = f'{caption}<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    if table.details:
        return f"<details><summary>{escape(table.title)}</summary>{body}</details>"
    return f"<h3>{escape(table.title)}</h3>{body}"


def _cell(tag: str, text: str, right: bool) -> str:
    return f'<{tag} class="number">{escape(text)}</{tag}>' if right else f"<{tag}>{escape(text)}</{tag}>"
