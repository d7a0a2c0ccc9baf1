"""Every fault of the catalogue has a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def numbers_in(paths: list[Path]) -> set[str]:
    names = [name for path in paths for name in re.findall(r"def test((?:_f\d\d)+)_", path.read_text(encoding="utf-8"))]
    return {number for name in names for number in re.findall(r"f\d\d", name)}


def test_each_fault_of_the_catalogue_has_a_test_and_each_number_a_row() -> None:
    rows = re.findall(r"^\| (F\d\d) \|(.*)$", (ROOT / "docs" / "faults.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {number.lower(): text for number, text in rows}
    assert len(listed) == len(rows) >= 34
    everywhere = sorted(TESTS.rglob("test_*.py"))
    assert numbers_in(everywhere) == set(listed)
    here = numbers_in([path for path in everywhere if TESTS / "gpu" not in path.parents])
    assert {number for number, text in listed.items() if "(GPU)" in text} == set(listed) - here
