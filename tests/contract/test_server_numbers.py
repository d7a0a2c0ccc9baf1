"""Every number that the server's page gives for its own cost comes from a committed result file."""

from __future__ import annotations

import re

from breakgraph.bench.result import Result, read_result
from contract.source_tree import ROOT

PAGE = ROOT / "docs" / "server.md"
_LINK = re.compile(r"\(\.\./(benchmarks/results/\S+\.json)\)")


def section(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def result_of(text: str) -> Result:
    """The one that a section links to."""
    (path,) = _LINK.findall(text)
    return read_result(ROOT / path)


def test_the_table_of_the_servers_cost() -> None:
    text = section("What the server costs")
    result = result_of(text)
    names = ("request_p50", "request_p99", "token_p50", "token_p99", "cpu_per_token")
    rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if re.match(r"\| \d", line)]
    expected = [
        [
            str(row.params["streams"]),
            *(f"{row.metrics[name].value:.{0 if name == 'cpu_per_token' else 1}f}" for name in names),
        ]
        for row in result.rows
    ]
    assert rows == expected
    assert f"{result.rows[0].params['step_ms']:g} ms" in text


def test_what_the_text_says_of_the_load() -> None:
    text = section("Measuring it")
    (row,) = result_of(text).rows
    for name in ("answered", "prompt_tokens", "generated_tokens"):
        assert re.search(rf"\b{row.metrics[name].value}\b", text), name
    assert row.metrics["failed"].value == 0
    rates = {row.metrics[f"{phase}_graph_hit_rate"].value for phase in ("prefill", "decode")}
    assert rates == {100.0}
    assert "every step ran as a graph" in text
