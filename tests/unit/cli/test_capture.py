from __future__ import annotations

import json
from pathlib import Path

import pytest

from breakgraph.cli.main import main


def test_a_line_for_each_bucket_and_totals(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args, "--prefill-buckets", "4,16"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("prefill", "decode"))]
    # phase, backend, bucket, segments, breaks
    assert [row[:5] for row in rows] == [
        ["prefill", "breakable", "16", "3", "2"],
        ["prefill", "breakable", "4", "3", "2"],
        ["decode", "full", "2", "1", "0"],
    ]
    assert "emulated" in out
    assert "graph pool" in out
    assert "KV cache" in out


def test_explain_adds_the_largest_plan_of_each_phase(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args, "--explain", "--prefill-buckets", "4,16"]) == 0
    out = capsys.readouterr().out
    assert "prefill[16] on cpu (emulated): 3 segments, 2 breaks" in out
    assert "decode[2] on cpu (emulated): 1 segments, 0 breaks" in out
    assert "prefill[4] on" not in out
    assert out.count("break attend") == 2


def test_memory_of_buckets_and_in_all(
    model_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["capture", *model_args, "--memory", "--prefill-buckets", "4,16"]) == 0
    out = capsys.readouterr().out
    table, _, totals = out.partition("memory of the buckets, MiB")[2].partition("memory in all, MiB")
    rows = [line.split() for line in table.splitlines() if line.startswith(("prefill", "decode"))]
    assert [(row[0], row[1], len(row)) for row in rows] == [
        ("prefill", "16", 7), ("prefill", "4", 7), ("decode", "2", 7),
    ]  # fmt: skip
    assert all(row[-1] == "?" for row in rows)
    assert float(rows[0][2]) > float(rows[1][2]) > 0
    for name in ("pool, shared by all buckets", "output buffer", "KV cache", "weights", "activation peak avoided"):
        assert name in totals
    assert "? is not measured on the emulated device" in totals
    assert max(map(len, out.splitlines())) <= 80


def test_without_the_option_there_is_no_memory_table(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args]) == 0
    assert "memory" not in capsys.readouterr().out


def test_backends_that_capture_nothing_say_so(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args, "--prefill-backend", "eager", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "prefill: nothing captured, backend eager" in out
    assert "decode[2]" in out


def test_an_option_of_another_backend_is_refused(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args, "--prefill-request-slots", "2"]) == 2
    assert "prefill_request_slots=2 is for prefill_backend='full'" in capsys.readouterr().err


def test_a_full_prefill_graph_has_no_breaks(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args, "--prefill-backend", "full", "--prefill-request-slots", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("prefill")]
    assert rows
    assert {(row[1], row[3], row[4]) for row in rows} == {("full", "1", "0")}


def test_a_trace_of_the_largest_prefill_bucket(
    model_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert main(["capture", *model_args, "--trace", str(path)]) == 0
    assert f"trace of 5 steps in {path}: open it at https://ui.perfetto.dev" in capsys.readouterr().out
    names = [entry["name"] for entry in json.loads(path.read_text())["traceEvents"] if entry["ph"] == "X"]
    assert names == ["segment 0", "break attend", "segment 1", "break attend", "segment 2"]


def test_a_trace_of_nothing_is_refused(
    model_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert main(["capture", *model_args, "--prefill-backend", "eager", "--trace", str(path)]) == 2
    assert "expected a captured prefill bucket to trace, and backend 'eager' has none" in capsys.readouterr().err
    assert not path.exists()
