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
    columns = [f"{name} ({fusion})" for name in ("eager", "breakable", "full") for fusion in ("inductor", "unfused")]
    columns.append("transformers, eager (unfused, sdpa)")
    assert head == f"| tokens | {' | '.join(columns)} | GPU busy |"
    assert [row.split(" ")[1] for row in rows] == ["128", "512", "2048", "8192"]
    written = "\n".join(("### ms a step, 1 request\n\nattention triton or flashinfer\n", head, rule, *rows))
    assert written in render([result], "markdown")
    assert f"({path})" in text
    versions = f"torch {result.versions.torch}, transformers {result.versions.transformers}"
    assert f"{result.where.device_name}, {versions}" in text


def test_the_times_of_serving_are_those_of_the_result_file() -> None:
    result = read_result(ROOT / "benchmarks" / "results" / "serve_8b.json")
    ours, theirs = (row for row in result.rows if row.name == "serve")
    assert result.shape.model == "qwen3-8b"
    assert (ours.params["backend"], theirs.params["backend"]) == ("breakable", "transformers continuous batching")
    assert (ours.metrics["requests"].value, ours.metrics["answer_tokens"].value) == (256, 256 * 200)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    times = f"{ours.metrics['time'].value:.1f} s, and the continuous batching of `transformers` "
    assert f"take the Qwen3-8B shape {times}{theirs.metrics['time'].value:.0f} s" in text


def test_what_the_text_says_beside_the_table() -> None:
    result = read_result(ROOT / "benchmarks" / "results" / "prefill_8b.json")
    assert result.shape.model == "qwen3-8b"
    assert {row.params["requests"] for row in result.rows if row.name == "prefill"} == {1}
    for row in result.rows:
        if row.name != "prefill":
            continue
        if row.params.get("backend") in ("breakable", "full"):
            assert row.metrics["equals_eager"].value
            assert row.metrics["back_to_back"].value > 0
        if row.params.get("backend") == "breakable":
            assert row.metrics["equals_full"].value
            assert row.metrics["breaks"].value == 36
