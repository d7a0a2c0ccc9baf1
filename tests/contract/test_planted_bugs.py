"""The edits of benchmarks/planted_bugs.py fit the sources as they are, and its results are of these edits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from breakgraph.bench.result import read_result

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def planted() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_bugs", ROOT / "benchmarks" / "planted_bugs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_every_edit_finds_its_lines_once(planted: ModuleType) -> None:
    texts = {bug.file: (ROOT / "src" / "breakgraph" / bug.file).read_text(encoding="utf-8") for bug in planted.BUGS}
    assert {bug.name: texts[bug.file].count(bug.old) for bug in planted.BUGS} == {bug.name: 1 for bug in planted.BUGS}
    assert all(bug.old != bug.new for bug in planted.BUGS)


@pytest.mark.parametrize(("name", "gpu"), [("planted_bugs", False), ("planted_bugs_gpu", True)])
def test_the_results_are_of_these_bugs_and_none_survived(planted: ModuleType, name: str, gpu: bool) -> None:
    result = read_result(ROOT / "benchmarks" / "results" / f"{name}.json")
    assert {row.name for row in result.rows} == {bug.name for bug in planted.BUGS if bug.gpu == gpu}
    assert all(row.metrics["killed"].value for row in result.rows)
