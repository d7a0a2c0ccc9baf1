"""`breakgraph env`: what is installed, which devices there are, what can be used and why the rest cannot.

It is what a bug report carries, so it works on a broken installation: every import is tried and its failure told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from breakgraph import __version__
from breakgraph.bench.result import cpu_name, gpu_driver, installed_version
from breakgraph.cli.engine_options import CACHE_VARIABLE

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "gguf", "accelerate", "numpy", "rich", "tqdm")
# models.source.DEFAULT_CACHE_DIR, spelt again because importing that needs a torch that works.
_DEFAULT_CACHE = "~/.cache/breakgraph"
_FLASH_CAPABILITY = (8, 0)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "env", help="print versions, devices and what is available", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    report = collect()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where converted models are kept unless a command is given another folder."""
    return Path(environ.get(CACHE_VARIABLE) or _DEFAULT_CACHE).expanduser()


def collect() -> dict[str, Any]:
    """The report as JSON types.

    `versions` maps a package to its version, or to a sentence that says why there is none. `devices` have a name,
    memory in bytes and, for GPUs, a compute capability. `available` says of each feature whether it is ready, and
    why not.
    """
    torch, failure = _try_import("torch")
    versions = {"breakgraph": __version__, "python": platform.python_version()}
    versions |= {package: installed_version(package) or "not installed" for package in _PACKAGES}
    versions["torch"] = _torch_version(torch, versions["torch"], failure)
    versions["cuda"] = _cuda_version(torch)
    versions["driver"] = gpu_driver() or "none found (nvidia-smi is missing or failed)"
    devices = _devices(torch)
    cache = cache_folder()
    return {
        "versions": versions,
        "platform": platform.platform(),
        "devices": devices,
        "available": _available(torch, failure, [d for d in devices if d["kind"] == "gpu"]),
        "cache_folder": {"path": str(cache), "exists": cache.is_dir()},
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as aligned text."""
    cache = report["cache_folder"]
    sections = {
        "versions": {**report["versions"], "platform": report["platform"]},
        "devices": {device["id"]: _device_line(device) for device in report["devices"]},
        "available": {name: _feature_line(feature) for name, feature in report["available"].items()},
        "files": {"cache folder": cache["path"] + ("" if cache["exists"] else " (not made yet)")},
    }
    width = max(len(name) for rows in sections.values() for name in rows) + 2
    lines = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<{width}}{value}" for name, value in rows.items())]
    return "\n".join(lines)


def _device_line(device: Mapping[str, Any]) -> str:
    parts = [device["name"]]
    if device["memory_bytes"] is not None:
        parts.append(f"{device['memory_bytes'] / 2**30:.1f} GiB")
    if device["capability"] is not None:
        parts.append(f"compute capability {device['capability']}")
    return ", ".join(parts)


def _feature_line(feature: Mapping[str, Any]) -> str:
    if not feature["ready"]:
        return f"no: {feature['detail']}"
    return f"yes ({feature['detail']})" if feature["detail"] else "yes"


def _try_import(name: str) -> tuple[ModuleType | None, str]:
    """The module, or None and what its import said. A broken shared library raises more than ImportError."""
    try:
        return import_module(name), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _torch_version(torch: ModuleType | None, installed: str, failure: str) -> str:
    """The module's own version names its CUDA build, which the package metadata leaves out."""
    if torch is not None:
        return str(torch.__version__)
    return installed if installed == "not installed" else f"{installed}, but its import fails: {failure}"


def _cuda_version(torch: ModuleType | None) -> str:
    if torch is None:
        return "unknown (torch does not import)"
    return torch.version.cuda or torch.version.hip or "none (CPU build of torch)"


def _devices(torch: ModuleType | None) -> list[dict[str, Any]]:
    devices = [{"id": "cpu", "kind": "cpu", "name": cpu_name(), "memory_bytes": _ram_bytes(), "capability": None}]
    if torch is None or not torch.cuda.is_available():
        return devices
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        gpu = {"id": f"cuda:{index}", "kind": "gpu", "name": facts.name, "memory_bytes": facts.total_memory}
        devices.append(gpu | {"capability": f"{facts.major}.{facts.minor}"})
    return devices


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _available(torch: ModuleType | None, failure: str, gpus: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Feature -> {"ready": bool, "detail": the reason when it is not ready, else a limit or nothing}."""
    no_torch = f"torch does not import ({failure})" if torch is None else ""
    flash = flashinfer = triton = graphs = sdpa = cpu_device = no_torch
    if torch is not None:
        no_gpu = "" if gpus else _why_no_gpu(torch)
        flash, triton, graphs = no_gpu or _why_no_flash(torch, gpus), no_gpu or _why_not("triton", "triton"), no_gpu
        flashinfer = no_gpu or _why_not("flashinfer", "flashinfer-python")
    return {
        "attention sdpa": _feature(sdpa),
        "attention flash": _feature(flash, "bfloat16 and float16"),
        "attention triton": _feature(triton),
        "attention flashinfer": _feature(flashinfer, "float16 and bfloat16; compiled on first use"),
        "CUDA graphs": _feature(graphs),
        "CPU device": _feature(cpu_device, "emulated; it checks captures and claims no speed"),
    }


def _feature(why_not: str, limit: str = "") -> dict[str, Any]:
    return {"ready": not why_not, "detail": why_not or limit}


def _why_no_gpu(torch: ModuleType) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is a CPU build"
    return "torch finds no GPU (check the driver and CUDA_VISIBLE_DEVICES)"


def _why_no_flash(torch: ModuleType, gpus: list[dict[str, Any]]) -> str:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without FlashAttention"
    too_old = [gpu["id"] for gpu in gpus if tuple(map(int, gpu["capability"].split("."))) < _FLASH_CAPABILITY]
    if too_old:
        return f"needs compute capability {'.'.join(map(str, _FLASH_CAPABILITY))}, which {', '.join(too_old)} lacks"
    return ""


def _why_not(module: str, package: str) -> str:
    imported, failure = _try_import(module)
    if imported is not None:
        return ""
    return f"its import fails ({failure})" if installed_version(package) else "not installed"
