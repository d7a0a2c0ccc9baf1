"""Ctrl-C as a user sends it: to a process on a terminal, while its progress bar shows what it is doing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import breakgraph


def run_until(argv: list[str], bar: bytes) -> tuple[int, str, str]:
    """Interrupts the command as soon as stderr, a terminal, shows `bar`. (exit code, stdout, stderr)"""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environ = {**os.environ, "PYTHONPATH": str(Path(breakgraph.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "breakgraph", *argv]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, env=environ
    ) as process:
        os.close(theirs)
        shown, is_sent = b"", False
        while chunk := _read(ours):
            shown += chunk
            if not is_sent and bar in shown:
                process.send_signal(signal.SIGINT)
                is_sent = True
        assert process.stdout is not None
        out = process.stdout.read().decode()
    os.close(ours)
    assert is_sent, f"{bar!r} was never shown, but {shown.decode()!r}"
    return process.returncode, out, shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other side was closed
        return b""


@pytest.fixture(scope="module")
def long_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers may be long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("long")
    config = json.loads((llama_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    return folder


@pytest.mark.parametrize(
    ("bar", "options"),
    [
        ("capture prefill", ["--max-num-batched-tokens", "256"]),
        ("generate", ["--max-num-batched-tokens", "8", "--prefill-buckets", "8", "--decode-buckets", "1"]),
    ],
)
def test_ctrl_c_ends_the_command_with_one_line(long_folder: Path, bar: str, options: list[str]) -> None:
    argv = ["generate", "--model", str(long_folder), "--load-format", "dummy", "--prompt-token-ids", "1,2,3"]
    sizes = ["--device", "cpu", "--max-model-len", "4096", "--max-num-seqs", "1", "--max-tokens", "4000"]
    code, out, err = run_until([*argv, *sizes, *options], bar.encode())
    assert code == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.rstrip().endswith("interrupted")
