"""Every number in the README's table comes from a committed result file."""

from __future__ import annotations

import re
from pathlib import Path

from breakgraph.bench.result import read_result

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_the_table_is_the_result_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    result = read_result(ROOT / "benchmarks" / "results" / "prefill_backends_8b.json")
    rows = {row.name: {name: metric.value for name, metric in row.metrics.items()} for row in result.rows}
    table = ROW.findall(text)
    assert len(table) == 4
    for tokens, *shown in table:
        row = rows[f"{tokens} tokens, 1 requests"]
        columns = ("eager", "breakable", "full", "gpu_busy_breakable")
        assert [f"{row[name]:.1f}" for name in columns] == shown
    assert all(row["full_equals_breakable"] for row in rows.values())
    assert {requests for row in result.rows if (requests := row.params["requests"])} == {1, 4, 16}
    assert f"NVIDIA H200, torch {result.versions.torch}, transformers {result.versions.transformers}" in text
