from __future__ import annotations

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


def test_backends_that_capture_nothing_say_so(model_args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", *model_args, "--prefill-backend", "eager", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "prefill: nothing captured, backend eager" in out
    assert "decode[2]" in out


def test_a_backend_that_attention_cannot_serve_is_refused(
    model_args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", *model_args, "--prefill-backend", "full"]) == 2
    assert "prefill with backend 'full' needs an attention" in capsys.readouterr().err
