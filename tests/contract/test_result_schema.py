"""The result file's schema is frozen: committed figures must stay readable. A change raises `schema_version`."""

from __future__ import annotations

import json
from pathlib import Path

from breakgraph.bench import result

GOLDEN = Path(__file__).with_name("result_v1.json")


def field_paths(value: object, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path} | {leaf for key, item in value.items() for leaf in field_paths(item, f"{path}.{key}")}
    if isinstance(value, list):
        return {leaf for item in value for leaf in field_paths(item, f"{path}[]")} or {path}
    return {path}


def test_the_golden_file_is_written_back_byte_for_byte(tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    result.write_result(copy, result.read_result(GOLDEN))
    assert copy.read_bytes() == GOLDEN.read_bytes()


def test_no_field_was_added_or_renamed() -> None:
    assert field_paths(json.loads(GOLDEN.read_text(encoding="utf-8"))) == {
        "",
        *(f".run{name}" for name in ("", ".command", ".git_commit", ".started_at")),
        *(f".where{name}" for name in ("", ".device", ".device_name", ".driver", ".emulated")),
        *(f".versions.{name}" for name in ("breakgraph", "torch", "transformers", "triton", "python", "cuda")),
        *(".versions", ".shape", ".shape.model", ".shape.dtype", ".notes[]", ".excluded[]", ".schema_version"),
        *(f".rows[]{name}" for name in ("", ".name", ".params", ".params.bucket", ".params.backend", ".metrics")),
        *(f".rows[].metrics.latency_p50{name}" for name in ("", ".value", ".unit")),
        *(f".rows[].metrics.segments{name}" for name in ("", ".value", ".unit")),
        *(f".rows[].metrics.bit_equal{name}" for name in ("", ".value", ".unit")),
    }


def test_the_units_are_a_closed_list() -> None:
    units = "ms s us bytes MiB count ratio tokens/s GB/s TFLOP/s percent bool"
    assert list(result.UNITS) == units.split()
