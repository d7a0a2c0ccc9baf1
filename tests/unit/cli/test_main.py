"""What every command has in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import breakgraph
from breakgraph.cli import env, main


def test_output_that_nobody_reads_any_longer_is_no_error() -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(breakgraph.__file__).parents[1])}
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "breakgraph", "env"], stdout=theirs, stderr=subprocess.PIPE, env=environ, check=False
    )
    os.close(theirs)
    assert done.returncode == 141
    assert done.stderr == b""


def test_another_pipe_that_breaks_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(args: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(env, "run", fail)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(BrokenPipeError):
            main.main(["env"])
