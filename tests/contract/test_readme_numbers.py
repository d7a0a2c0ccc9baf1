"""Every number in the README's table comes from a committed result file."""

from __future__ import annotations

import re
from pathlib import Path

from breakgraph.bench.result import read_result

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+) of (\d+) \|$", re.MULTILINE)


def test_the_table_is_the_result_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    result = read_result(ROOT / "benchmarks" / "results" / "capture_check_8b.json")
    rows = {row.name: {name: metric.value for name, metric in row.metrics.items()} for row in result.rows}
    table = ROW.findall(text)
    assert len(table) == 4
    for bucket, eager, replay, wrong, steps in table:
        row = rows[f"prefill[{bucket}]"]
        assert f"{row['eager_padded']:.1f}" == eager
        assert f"{row['replay']:.1f}" == replay
        assert row["wrong_logits"] + row["wrong_kv"] == int(wrong)
        assert row["replays"] == int(steps)
        assert f"{row['segments']} graph segments around {row['breaks']} eager" in text
    assert f"NVIDIA H200, torch {result.versions.torch}, transformers {result.versions.transformers}" in text
