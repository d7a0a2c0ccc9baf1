from __future__ import annotations

from pathlib import Path

import pytest

from breakgraph.cli.main import main

GOLDEN = str(Path(__file__).parents[2] / "contract" / "result_v1.json")


def test_text_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", GOLDEN, GOLDEN]) == 0
    out = capsys.readouterr().out
    assert out.count("example, bfloat16, Example GPU") == 2
    assert "command: an example, not a measurement" in out


@pytest.mark.parametrize(("form", "begin"), [("markdown", "## example, bfloat16"), ("html", "<!doctype html>")])
def test_other_formats_go_where_they_are_sent(
    form: str, begin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    assert main(["report", GOLDEN, "--format", form, "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert out.read_text(encoding="utf-8").startswith(begin)


def test_one_broken_file_stops_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, out = tmp_path / "broken.json", tmp_path / "report.md"
    broken.write_text("{}")
    assert main(["report", GOLDEN, str(broken), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"result file {broken}: run: missing field" in printed.err
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", GOLDEN, "--out", str(tmp_path / "gone" / "page.html")]) == 2
    assert "the report cannot be written to" in capsys.readouterr().err
