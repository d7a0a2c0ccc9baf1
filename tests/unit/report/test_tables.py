from __future__ import annotations

import pytest

from breakgraph.bench.result import Metric, Row
from breakgraph.report.latency import labels, latencies
from breakgraph.report.tables import Table, facts, heading, number, tables
from unit.report.results import (
    capture_result,
    committed,
    count,
    ms,
    prefill_result,
    prefill_row,
    result,
)


def by_title(made: list[Table]) -> dict[str, Table]:
    return {table.title: table for table in made}


def test_latencies_of_a_committed_result() -> None:
    rows = [row for row in committed().rows if row.name == "prefill" and "time" in row.metrics]
    found = latencies(committed())
    assert len(found) == len(rows) > 4
    first, metrics = found[0], rows[0].metrics
    assert (first.tokens, first.requests, first.backend) == (128, 1, rows[0].params["backend"])
    assert [first.time, first.p10, first.gpu_busy] == [metrics[name].value for name in ("time", "p10", "gpu_busy")]


def test_a_table_of_latencies_for_each_number_of_requests() -> None:
    made = by_title(tables(prefill_result()))
    table = made["ms a step, 1 request"]
    assert table.columns == ("tokens", "eager", "breakable", "full", "torch.compile, body only (sdpa)", "GPU busy")
    assert table.rows == (
        ("8", "160.0", "12.8", "12.0", "14.0", "10.0"),
        ("16", "320.0", "25.6", "24.0", "", "20.0"),
    )
    assert table.caption == "attention triton"
    assert made["ms a step, 4 requests"].columns == ("tokens", "eager", "breakable", "full", "GPU busy")


def test_small_times_get_another_decimal() -> None:
    (table, *_) = tables(result(prefill_row("full", 8, 2.346), prefill_row("full", 16, 100.0)))
    assert [row[1] for row in table.rows] == ["2.35", "100.00"]


def test_labels_say_what_differs_and_no_more() -> None:
    rows = [prefill_row("full", 8, 1.0), prefill_row("full", 8, 1.0, fusion="inductor"), prefill_row("eager", 8, 1.0)]
    assert list(labels(latencies(result(*rows))).values()) == ["eager (unfused)", "full (inductor)", "full (unfused)"]
    rows = [prefill_row("full", 8, 1.0), prefill_row("full", 8, 1.0, attention="flash")]
    assert list(labels(latencies(result(*rows))).values()) == ["full (flash)", "full (triton)"]


def test_all_figures_of_a_step_are_details() -> None:
    made = by_title(tables(prefill_result()))
    main, every = made["prefill"], made["prefill, all figures"]
    assert not main.details
    assert every.details
    assert "time, ms [p10, p90]" in main.columns
    assert main.rows[0][main.columns.index("time, ms [p10, p90]")] == "12 [10.8, 13.2]"
    assert main.rows[1][main.columns.index("= full")] == "NO"
    assert main.is_number[main.columns.index("tokens")]
    assert not main.is_number[main.columns.index("backend")]


def test_what_is_the_same_in_all_rows_is_said_once() -> None:
    rows = [prefill_row("full", 8, 1.0), prefill_row("full", 16, 2.0)]
    table = by_title(tables(result(*rows)))["prefill"]
    assert table.caption == "requests 1, backend full, fusion none, attention triton"
    assert table.columns[0] == "tokens"


def test_rows_with_names_of_their_own_go_together() -> None:
    rows = [Row(name=f"case {i}", params={"arm": "same"}, metrics={"figure": count(i)}) for i in range(2)]
    (table,) = tables(result(*rows, Row(name="cost", params={}, metrics={"all": ms(3.0)})))[:1]
    assert (table.columns, table.rows) == (("name", "figure"), (("case 0", "0"), ("case 1", "1")))


def test_a_single_row_is_a_list_of_figures() -> None:
    (table,) = tables(result(Row(name="cost", params={"of": "it"}, metrics={"all": ms(3.0), "n": count(2)})))
    assert table.rows == (("all", "3", "ms"), ("n", "2", ""))
    assert table.caption == "of it"


def test_a_column_of_several_units_says_them_in_its_cells() -> None:
    rates = {"one": Metric(value=2.5, unit="ms"), "other": Metric(value=3.5, unit="us")}
    (table,) = tables(result(*(Row(name="limit", params={"what": w}, metrics={"rate": m}) for w, m in rates.items())))
    assert (table.columns, table.rows) == (("what", "rate"), (("one", "2.5 ms"), ("other", "3.5 us")))


def test_steps_are_summed_by_kind() -> None:
    table = by_title(tables(capture_result()))["steps of a replay"]
    assert [row[5:] for row in table.rows] == [("segment", "2", "14", "21.0", "42"), ("break", "1", "0", "21.0", "21")]
    emulated = by_title(tables(capture_result(emulated=True)))["steps of a replay"]
    assert [row[8:] for row in emulated.rows] == [("", ""), ("", "")]


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Metric(value=True, unit="bool"), "yes"),
        (Metric(value=False, unit="bool"), "NO"),
        (count(12345), "12345"),
        (ms(12345.6), "12346"),
        (ms(1.23456), "1.235"),
        (ms(0.0), "0"),
        (Metric(value=2.5e-7, unit="ratio"), "2.5e-07"),
        (Metric(value=3 << 19, unit="bytes"), "1.5"),
    ],
)
def test_numbers_for_people(metric: Metric, text: str) -> None:
    assert number(metric) == text


def test_facts_name_command_versions_and_what_is_left_out() -> None:
    known = dict(facts(prefill_result()))
    assert known["command"] == "breakgraph bench prefill --tokens 8,16"
    assert known["commit"] == "not from a checkout"
    assert known["versions"] == "breakgraph 0.1.0, torch 2.11.0, Python 3.12.3"
    assert known["excluded"] == "sampling"
    assert heading(capture_result(emulated=True)) == "example, bfloat16, Example device (emulated: claims no speed)"


def test_kernels_are_details() -> None:
    params = {"tokens": 8, "backend": "full", "kernel": "gemm"}
    metrics = {"time": Metric(value=2.5, unit="ms"), "calls": Metric(value=36, unit="count")}
    rows = [Row(name="kernel", params={**params, "kernel": name}, metrics=metrics) for name in ("gemm", "norm")]
    table = by_title(tables(result(prefill_row("full", 8, 1.0), *rows)))["kernels"]
    assert table.details
    assert table.columns == ("kernel", "time, ms", "calls")
    assert table.rows == (("gemm", "2.5", "36"), ("norm", "2.5", "36"))
