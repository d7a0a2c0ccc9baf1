"""The examples as users run them: each in a process of its own, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60

KEY_LINES = {
    "break_in_the_middle.py": (
        "eager_on_graph: 2 segments, 1 break, as eager: yes",
        "mark_eager: 2 segments, 1 break, as eager: yes",
    ),
    "generate_text.py": ("captured answers equal eager ones: yes",),
    "plain_module.py": ("replay equals model(x): yes",),
    "refused_by_tracing.py": ("breakable: 2 segments, 1 break, as eager: yes",),
    "two_buckets.py": (
        "borrow: 5 rows ran in bucket 8, 1 row in bucket 2; first answer after the second: overwritten",
        "copy: 5 rows ran in bucket 8, 1 row in bucket 2; first answer after the second: still there",
    ),
}


def test_every_example_is_run() -> None:
    assert [path.name for path in EXAMPLES] == sorted(KEY_LINES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_says_so(path: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line for line in KEY_LINES[path.name] if line not in lines] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < MAX_LINES
    assert text.startswith('"""')
