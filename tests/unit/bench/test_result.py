"""The result file: round trips, refusals that name the field, and a writer that never leaves half a file."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.bench import result
from breakgraph.bench.result import Metric, Result, Row, Run, Shape, Versions, Where
from breakgraph.errors import ConfigError


def sample(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "run": Run(command="bench", git_commit=None, started_at="2026-03-01T12:00:00+00:00"),
        "where": Where(device="cpu", device_name="some processor", driver=None, emulated=True),
        "versions": Versions(breakgraph="1", torch="2", transformers=None, triton=None, python="3", cuda=None),
        "shape": Shape(model={"num_layers": 2, "tied": True}, dtype="float32"),
        "rows": (Row(name="a", params={"bucket": 8}, metrics={"latency": Metric(value=1.5, unit="ms")}),),
        "notes": ("emulated: no speed is claimed",),
    }
    return Result(**(fields | changes))


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(result.to_json(sample()))
    return loaded


def set_path(target: Any, path: str, value: object) -> None:
    """Set the item at `a.b[0].c`; the value ... deletes it."""
    *parents, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)]
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    result.write_result(path, sample())
    assert result.read_result(str(path)) == sample()
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
names = st.text(min_size=1)


@given(params=st.dictionaries(names, scalars), name=st.text(), value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_row_round_trips(params: dict[str, Any], name: str, value: float) -> None:
    row = Row(name=name, params=params, metrics={"m": Metric(value=value, unit="tokens/s")})
    assert result.from_json(result.to_json(sample(rows=(row,)))).rows == (row,)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("rows[0].metrics.latency.unit", "msec", "expected one of ms, s, us"),
        ("rows[0].metrics.latency.value", "1.5", "expected int | float | bool, got str '1.5'"),
        ("rows[0].metrics.latency.value", None, "got null"),
        ("rows[0].metrics.latency.value", True, "unit 'ms' does not take True"),
        ("rows[0].metrics.latency.value", math.nan, "expected a finite number, got nan"),
        ("rows[0].metrics.latency.extra", 1, "unknown field; expected one of value, unit"),
        ("rows[0].metrics.latency", 1.5, "expected dict, got float"),
        ("rows[0].metrics", {}, "expected at least one metric"),
        ("rows[0].params.bucket", [8], "got list"),
        ("rows[0].params.bucket", math.inf, "expected a finite number"),
        ("rows[0].name", ..., "missing field"),
        ("rows", {}, "expected tuple[Row, ...], got dict"),
        ("rows", [], "expected at least one row"),
        ("run.started_at", "2026-03-01T12:00:00", "UTC offset"),
        ("run.started_at", "yesterday", "UTC offset"),
        ("run.command", 3, "expected str, got int '3'"),
        ("where.device", "tpu", "expected Literal['cpu', 'gpu'], got str 'tpu'"),
        ("where.emulated", 1, "expected bool, got int"),
        ("where.hostname", "node7", "unknown field"),
        ("versions.torch", None, "expected str, got null"),
        ("shape.model", 8, "expected str | Mapping[str, str | int | float | bool | None], got int"),
        ("shape.model.num_layers", [2], "got list"),
        ("notes[0]", 1, "expected str, got int"),
        ("schema_version", 2, "this breakgraph reads 1, got 2"),
        ("schema_version", True, "expected int, got bool"),
    ],
)
def test_a_bad_field_is_named_by_its_path(path: str, value: object, expected: str, tmp_path: Path) -> None:
    bad = document()
    set_path(bad, path, value)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(bad), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        result.read_result(file)
    message = str(refused.value)
    assert message.startswith(f"result file {file}: {path}: ")
    assert expected in message


def test_a_gpu_is_never_emulated() -> None:
    with pytest.raises(ConfigError, match=r"^emulated: only the device 'cpu'"):
        Where(device="gpu", device_name="x", driver="1", emulated=True)


@pytest.mark.parametrize("unit", ["bytes", "count"])
def test_whole_units_refuse_fractions(unit: str) -> None:
    with pytest.raises(ConfigError, match=r"^value: unit .* takes whole numbers, got 1.5"):
        Metric(value=1.5, unit=unit)


@pytest.mark.parametrize("value", [0, 1, 0.0])
def test_bool_takes_only_bools(value: float) -> None:
    with pytest.raises(ConfigError, match="does not take"):
        Metric(value=value, unit="bool")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "does not parse"),
        (b'{"run": ', "does not parse"),
        (b"\xff\xfe", "expected UTF-8 text"),
        (b"[]", "document: expected dict, got list"),
        (b"{}", "run: missing field"),
    ],
)
def test_what_is_no_result_file(content: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        result.read_result(file)


def test_missing_file_and_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no result file at .*absent"):
        result.read_result(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no result file at"):
        result.read_result(tmp_path)


def test_the_writer_refuses_what_the_reader_would(tmp_path: Path) -> None:
    row = Row(name="a", params={"shape": (1, 2)}, metrics={"m": Metric(value=1, unit="count")})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^rows\[0\]\.params\.shape: expected .* got list"):
        result.write_result(tmp_path / "r.json", sample(rows=(row,)))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    result.write_result(path, sample())

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result.os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        result.write_result(path, sample(notes=("newer",)))
    assert result.read_result(path) == sample()
    assert list(tmp_path.iterdir()) == [path]


def test_results_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().run.command = "other"  # type: ignore[misc]


def test_here(device: torch.device) -> None:
    run, where, versions = result.here("breakgraph bench", device)
    assert run.command == "breakgraph bench"
    assert datetime.fromisoformat(run.started_at) <= datetime.now(UTC)
    on_cpu = device.type == "cpu"
    assert where.device == ("cpu" if on_cpu else "gpu")
    assert where.device_name == (result.cpu_name() if on_cpu else torch.cuda.get_device_name(device))
    assert where.emulated == on_cpu
    assert versions.torch == torch.__version__
    assert versions.python == ".".join(map(str, sys.version_info[:3]))
    full = sample(run=run, where=where, versions=versions)
    assert result.from_json(result.to_json(full)) == full


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def checkout(folder: Path, package: str) -> Path:
    """A repository with one commit and a copy of the package below it; returns the module's place."""
    module = folder / package / "breakgraph" / "bench" / "result.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n", encoding="utf-8")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return module


def test_git_commit_is_the_checkouts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkout(tmp_path, "src")
    monkeypatch.setattr(result, "__file__", str(module))
    head = git(tmp_path, "rev-parse", "HEAD")
    assert result._git_commit() == head
    module.write_text("x = 2\n", encoding="utf-8")
    assert result._git_commit() == f"{head}-dirty"


def test_git_commit_of_somebody_elses_checkout_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkout(tmp_path, "venv/site-packages")
    monkeypatch.setattr(result, "__file__", str(module))
    assert result._git_commit() is None


def test_installed_version() -> None:
    assert result.installed_version("no-such-package-anywhere") is None
    assert result.installed_version("pytest") == pytest.__version__
