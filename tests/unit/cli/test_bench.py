from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from breakgraph.bench.config import PrefillBench, ServeBench
from breakgraph.bench.result import Metric, Result, Row, from_json, read_result
from breakgraph.cli import bench, main
from breakgraph.cli.bench import command_of, unequal

SMALL = ["bench", "prefill", "--device", "cpu", "--tokens", "8", "--requests", "1", "--peers", "none"]


def test_tables_then_one_line_of_json_and_the_same_in_the_file(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "result.json"
    assert main.main([*SMALL, "--model", str(llama_folder), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = read_result(out)
    assert from_json(lines[-1]) == written
    assert "\n" not in json.dumps(json.loads(lines[-1]))
    assert lines[0].startswith("prefill: tiny-llama, random weights, float32")
    assert lines[1].startswith("emulated: ")
    assert any(line.split()[:3] == ["breakable", "3", "2"] for line in lines)
    expected = f"breakgraph bench prefill --model {llama_folder} --device cpu --peers none --tokens 8 --requests 1"
    assert written.run.command == expected


def test_a_refusal_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert main.main(["bench", "prefill", "--tokens", "4", "--requests", "8", "--out", str(out)]) == 2
    assert "requests: expected at most 4" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(("place", "why"), [("", "it is a folder"), ("file/result.json", "exists|directory")])
def test_a_result_that_cannot_be_written_is_said_first(
    place: str, why: str, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main.main([*SMALL, "--model", str(llama_folder), "--out", str(tmp_path / place)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(f"no result can be written to .*({why})", printed.err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("num_lines", [1, 3])
def test_ctrl_c_keeps_what_was_measured(
    num_lines: int, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Interrupted while the second of two steps is told, or before the first one was."""
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if sum(line.startswith("prefill ") for line in told) == num_lines:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_tell", tell)
    out = tmp_path / "result.json"
    argv = [*SMALL, "--tokens", "8,16", "--backends", "eager,breakable", "--model", str(llama_folder)]
    assert main.main([*argv, "--out", str(out)]) == 130
    printed = capsys.readouterr()
    assert printed.err.rstrip() == "interrupted"
    if num_lines == 1:
        assert not printed.out
        assert not out.exists()
        return
    written = read_result(out)
    assert from_json(printed.out.splitlines()[-1]) == written
    assert [row.params["tokens"] for row in written.rows] == [8, 8]
    assert written.notes[-1] == "interrupted: only what was measured until then"


@pytest.mark.parametrize("argv", [["bench"], ["bench", "train"], ["bench", "decode", "--tokens", "8"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(argv)
    assert stop.value.code == 2
    assert "usage: breakgraph " in capsys.readouterr().err


def test_the_command_names_what_differs_from_the_defaults() -> None:
    assert command_of(PrefillBench()) == "breakgraph bench prefill"
    config = ServeBench(num_requests=4, attention=("triton", "flash"), seed=3, rounds=3)
    assert command_of(config) == "breakgraph bench serve --attention triton,flash --seed 3 --num-requests 4"


def differing(attention: str, **equal: bool) -> Result:
    params = {"backend": "breakable", "attention": attention}
    metrics = {f"equals_{name}": Metric(value=value, unit="bool") for name, value in equal.items()}
    base = read_result(Path(__file__).parents[2] / "contract" / "result_v1.json")
    return Result(
        run=base.run, where=base.where, versions=base.versions, shape=base.shape,
        rows=(Row(name="prefill", params=params, metrics=metrics),),
    )  # fmt: skip


def test_a_bit_that_should_be_equal_shows() -> None:
    assert unequal(differing("triton", eager=True, full=True)) == []
    assert unequal(differing("triton", eager=True, full=False)) == [
        "equals_full is false: backend breakable, attention triton"
    ]
    # Other kernels for breaks and graphs round differently, but a replay is always what Python computes.
    assert unequal(differing("flashinfer", eager=True, full=False)) == []
    assert unequal(differing("flashinfer", eager=False, full=False)) == [
        "equals_eager is false: backend breakable, attention flashinfer"
    ]


def test_nothing_has_to_equal_what_does_not_repeat_itself() -> None:
    assert unequal(differing("triton", full=False)) != []
    result = differing("triton", full=False)
    row = result.rows[0]
    again = dataclasses.replace(row, metrics={**row.metrics, "eager_repeats": Metric(value=False, unit="bool")})
    assert unequal(dataclasses.replace(result, rows=(again,))) == []


def test_what_differs_is_exit_code_1(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from breakgraph.runners import Runner

    padded = Runner.run_padded_eager
    monkeypatch.setattr(Runner, "run_padded_eager", lambda self, batch: padded(self, batch) + 1)
    assert main.main([*SMALL, "--model", str(llama_folder), "--backends", "breakable"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("equals_eager is false: tokens 8, requests 1, backend breakable")
    assert json.loads(lines[-1])
