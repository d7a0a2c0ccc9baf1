"""`breakgraph env` on good, broken and GPU installations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import breakgraph
from breakgraph.cli import env, main
from breakgraph.cli.engine_options import CACHE_VARIABLE
from breakgraph.models.source import DEFAULT_CACHE_DIR

SRC = Path(breakgraph.__file__).parents[1]


def run_with_torch(source: str, folder: Path) -> dict[str, Any]:
    """`env --json` in a process whose `import torch` runs `source`."""
    (folder / "torch.py").write_text(source, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(SRC)])}
    command = [sys.executable, "-m", "breakgraph", "env", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def fake_torch(*capabilities: tuple[int, int], cuda: str | None = "13.0", flash: bool = True) -> Any:
    """The part of torch that env reads, for a machine with these GPUs."""
    gpus = [
        SimpleNamespace(name=f"GPU {index}", total_memory=80 * 2**30, major=major, minor=minor)
        for index, (major, minor) in enumerate(capabilities)
    ]
    cuda_module = SimpleNamespace(
        is_available=lambda: bool(gpus), device_count=lambda: len(gpus), get_device_properties=gpus.__getitem__
    )
    flash_module = SimpleNamespace(cuda=SimpleNamespace(is_flash_attention_available=lambda: flash))
    version = SimpleNamespace(cuda=cuda, hip=None)
    return SimpleNamespace(__version__="2.11.0+cu130", cuda=cuda_module, backends=flash_module, version=version)


def collect_with(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> dict[str, Any]:
    def try_import(name: str) -> tuple[Any, str]:
        found = modules.get(name, "ModuleNotFoundError: none")
        return (None, found) if isinstance(found, str) else (found, "")

    monkeypatch.setattr(env, "_try_import", try_import)
    return env.collect()


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["breakgraph"] == breakgraph.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert len(report["devices"]) == 1 + torch.cuda.device_count()
    assert report["available"]["CUDA graphs"]["ready"] == torch.cuda.is_available()
    assert report["available"]["CPU device"]["ready"]
    assert report["available"]["attention sdpa"] == {"ready": True, "detail": ""}


def test_text_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["env"]) == 0
    text = capsys.readouterr().out
    report = env.collect()
    assert all(version in text for version in report["versions"].values())
    assert all(device["name"] in text for device in report["devices"])
    assert all(feature["detail"] in text for feature in report["available"].values())
    assert report["cache_folder"]["path"] in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "No module named 'torch'"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("raise RuntimeError('built for another NumPy')", "built for another NumPy"),
    ],
)
def test_torch_that_does_not_import(source: str, said: str, tmp_path: Path) -> None:
    report = run_with_torch(source, tmp_path)
    assert "its import fails" in report["versions"]["torch"]
    assert said in report["versions"]["torch"]
    assert [device["id"] for device in report["devices"]] == ["cpu"]
    assert len(report["available"]) == 6
    for feature in report["available"].values():
        assert not feature["ready"]
        assert said in feature["detail"]


def test_torch_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "installed_version", lambda package: None)
    report = collect_with(monkeypatch, {})
    assert report["versions"]["torch"] == "not installed"
    assert report["versions"]["cuda"] == "unknown (torch does not import)"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = dict.fromkeys(("triton", "flashinfer"), SimpleNamespace())
    report = collect_with(monkeypatch, {"torch": fake_torch((9, 0), (9, 0)), **kernels})
    assert report["versions"]["torch"] == "2.11.0+cu130"
    assert report["devices"][2] == {
        "id": "cuda:1", "kind": "gpu", "name": "GPU 1", "memory_bytes": 80 * 2**30, "capability": "9.0",
    }  # fmt: skip
    assert all(feature["ready"] for feature in report["available"].values())
    assert "cuda:0" in env.render(report)
    assert "GPU 1, 80.0 GiB, compute capability 9.0" in env.render(report)


@pytest.mark.parametrize(
    ("fake", "feature", "reason"),
    [
        (fake_torch(cuda=None), "CUDA graphs", "CPU build"),
        (fake_torch(), "CUDA graphs", "finds no GPU"),
        (fake_torch(), "attention flash", "finds no GPU"),
        (fake_torch((9, 0), flash=False), "attention flash", "without FlashAttention"),
        (fake_torch((9, 0), (7, 5)), "attention flash", "needs compute capability 8.0, which cuda:1 lacks"),
        (fake_torch((9, 0)), "attention triton", "its import fails (ImportError: broken)"),
    ],
)
def test_reasons(fake: Any, feature: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "installed_version", lambda package: "1.0")
    report = collect_with(monkeypatch, {"torch": fake, "triton": "ImportError: broken"})
    assert not report["available"][feature]["ready"]
    assert reason in report["available"][feature]["detail"]
    assert f"no: {report['available'][feature]['detail']}" in env.render(report)


def test_compute_capability_is_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    report = collect_with(monkeypatch, {"torch": fake_torch((12, 0)), "triton": SimpleNamespace()})
    assert report["available"]["attention flash"]["ready"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({CACHE_VARIABLE: "/data/bg"}, Path("/data/bg")),
        ({CACHE_VARIABLE: "~/bg"}, Path.home() / "bg"),
        ({CACHE_VARIABLE: ""}, DEFAULT_CACHE_DIR.expanduser()),
        ({}, DEFAULT_CACHE_DIR.expanduser()),
    ],
)
def test_cache_folder(environ: dict[str, str], expected: Path) -> None:
    assert env.cache_folder(environ) == expected


def test_a_cache_folder_that_exists_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    report = env.collect()
    assert report["cache_folder"] == {"path": str(tmp_path), "exists": True}
    assert "(not made yet)" not in env.render(report)
