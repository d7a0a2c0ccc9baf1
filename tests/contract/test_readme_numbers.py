"""Every number in the README's table comes from a committed result file, through `breakgraph report`."""

from __future__ import annotations

import re
from pathlib import Path

from breakgraph.bench.result import read_result
from breakgraph.report import render

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- breakgraph report (\S+) --format markdown -->\n(.*?)\n<!-- end of the report -->", re.DOTALL)


def test_the_table_is_the_report_of_the_result_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((path, table),) = BLOCK.findall(text)
    result = read_result(ROOT / path)
    head, rule, *rows = table.splitlines()
    assert head == "| tokens | eager | breakable | full | GPU busy |"
    assert [row.split(" ")[1] for row in rows] == ["128", "512", "2048", "8192"]
    assert f"### ms a step, 1 request\n\n{head}\n{rule}\n" + "\n".join(rows) in render([result], "markdown")
    assert f"({path})" in text
    versions = f"torch {result.versions.torch}, transformers {result.versions.transformers}"
    assert f"{result.where.device_name}, {versions}" in text


def test_what_the_text_says_beside_the_table() -> None:
    result = read_result(ROOT / "benchmarks" / "results" / "prefill_backends_8b.json")
    assert result.shape.model == "qwen3-8b"
    assert all(row.metrics["full_equals_breakable"].value for row in result.rows)
    assert {row.params["requests"] for row in result.rows} == {1, 4, 16}
