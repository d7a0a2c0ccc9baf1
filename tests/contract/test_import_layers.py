"""Who may import whom: every import of every source file against one table."""

from __future__ import annotations

import sys
import tomllib

import pytest

from contract.source_tree import ROOT, SRC, Import, Module, all_modules, is_module, modules_of, parse_module

_ENGINE_AND_BELOW = {"graph", "backends", "attention", "models", "runners", "verify", "engine"}

# What a unit may import besides itself and `errors`. A new package gets a row before it gets an import.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "graph": set(),
    "backends": {"graph"},
    "attention": {"graph"},
    "models": {"graph", "attention"},
    "runners": {"graph", "backends", "attention"},
    "verify": {"graph", "backends", "attention", "runners"},
    "engine": {"graph", "backends", "attention", "models", "runners", "verify"},
    "api": {"graph", "backends", "verify"},
    "bench": _ENGINE_AND_BELOW,
    "report": {"bench"},
    "server": _ENGINE_AND_BELOW,
    "cli": _ENGINE_AND_BELOW | {"api", "bench", "report", "server"},
    "__init__": _ENGINE_AND_BELOW | {"api"},
    "__main__": {"cli"},
}

# Within a unit that is open to a layer: the modules that stay closed to it.
CLOSED = {
    "runners": (
        *(f"breakgraph.attention.{name}" for name in ("sdpa", "flash", "flashinfer", "triton")),
        *(f"breakgraph.backends.{name}" for name in ("eager", "full", "breakable")),
    ),
}
REPORT_READS = "breakgraph.bench.result"

FORBIDDEN_PACKAGES = {
    "backends": {"transformers"},
    "attention": {"transformers"},
    "runners": {"transformers"},
    "verify": {"transformers"},
    "report": {"torch", "transformers"},
}
STDLIB_AND_TORCH_ONLY = {"graph"}
# Absent from GPU machines that run these layers, so at most imported where they are used.
LAZY_ONLY = {"gguf"}
# The extra `server`, and what comes with it and with torch. `breakgraph serve` alone loads the package that needs them.
SERVER_ONLY = {"fastapi", "jinja2", "prometheus_client", "pydantic", "pydantic_core", "starlette"} | {
    "httpx",
    "typing_extensions",
    "uvicorn",
}
# Triton comes with the CUDA builds of torch, not with the CPU ones; FlashInfer, matplotlib, Ray, which brings grpc, and
# xgrammar are extras; vLLM is compared with where it is installed.
OPTIONAL = {"flashinfer", "grpc", "matplotlib", "ray", "triton", "vllm", "xgrammar"}


def target_unit(target: str) -> str:
    """The unit an import reaches; a name taken from the top package counts as `__init__`."""
    parts = target.split(".")
    if len(parts) == 1 or not is_module(".".join(parts[:2])):
        return "__init__"
    return parts[1]


def layer_fault(module: Module, item: Import) -> str | None:
    """What is wrong with one import inside breakgraph, or None."""
    unit, reached = module.unit, target_unit(item.target)
    if reached in (unit, "errors") or item.target == "breakgraph.__version__":
        return None
    where = f"{module.where(item.line)} imports {item.target}"
    if reached == "__init__":
        return f"{where}: import the name from the package that defines it"
    if reached not in LAYERS[unit]:
        return f"{where}: {unit} may import {', '.join(sorted(LAYERS[unit])) or 'nothing'}"
    if any(item.target == closed or item.target.startswith(f"{closed}.") for closed in CLOSED.get(unit, ())):
        return f"{where}: {unit} sees the interface only"
    if unit == "report" and not item.target.startswith(REPORT_READS):
        return f"{where}: report reads {REPORT_READS} only"
    return None


def third_party_fault(module: Module, item: Import, declared: set[str]) -> str | None:
    """What is wrong with one import from outside breakgraph and the standard library, or None."""
    package, unit = item.target.split(".")[0], module.unit
    where = f"{module.where(item.line)} imports {package}"
    if unit in STDLIB_AND_TORCH_ONLY and package != "torch":
        return f"{where}: {unit} uses torch and the standard library only"
    if package in SERVER_ONLY:
        return None if unit == "server" else f"{where}: only server may"
    if package in FORBIDDEN_PACKAGES.get(unit, ()):
        return f"{where}: {unit} must not"
    if package in LAZY_ONLY and not item.lazy and unit != "cli":
        return f"{where} at module level: import it in the function that needs it"
    if package not in declared | OPTIONAL:
        return f"{where}: not among the dependencies in pyproject.toml"
    return None


def declared_packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {requirement.split(">")[0].split("[")[0].strip() for requirement in project["dependencies"]}


def is_own(item: Import) -> bool:
    return item.target.split(".")[0] == "breakgraph"


def is_stdlib(item: Import) -> bool:
    return item.target.split(".")[0] in sys.stdlib_module_names


def test_every_unit_has_a_row() -> None:
    assert {module.unit for module in all_modules()} <= LAYERS.keys()


def test_layers() -> None:
    faults = [layer_fault(module, item) for module in all_modules() for item in module.imports() if is_own(item)]
    assert not [fault for fault in faults if fault]


def test_third_party_packages() -> None:
    declared = declared_packages()
    faults = [
        third_party_fault(module, item, declared)
        for module in all_modules()
        for item in module.imports()
        if not is_own(item) and not is_stdlib(item)
    ]
    assert not [fault for fault in faults if fault]


def test_result_schema_and_cli_modules_load_without_torch() -> None:
    for module in [*modules_of("cli", "report", "errors"), *[m for m in all_modules() if m.name == REPORT_READS]]:
        eager = {item.target.split(".")[0] for item in module.imports() if not item.lazy}
        assert not eager & {"torch", "transformers"}, module.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("breakgraph.graph.plan", "from breakgraph.backends.base import Backend"),
        ("breakgraph.graph.plan", "def f():\n    import breakgraph.engine"),
        ("breakgraph.graph.plan", "from ..runners import base"),
        ("breakgraph.graph.plan", "if not TYPE_CHECKING:\n    from breakgraph import cli"),
        ("breakgraph.graph.plan", "import_module('breakgraph.engine')"),
        ("breakgraph.graph.plan", "TABLE = {'x': 'breakgraph.engine:LLM'}"),
        ("breakgraph.runners.base", "from breakgraph.attention import sdpa"),
        ("breakgraph.runners.base", "from breakgraph.backends.full import FullBackend"),
        ("breakgraph.engine.llm", "from breakgraph import capture"),
        ("breakgraph.engine.llm", "from breakgraph.cli import main"),
        ("breakgraph.engine.llm", "from breakgraph.server import app"),
        ("breakgraph.server.app", "from breakgraph.bench import result"),
        ("breakgraph.report.render", "from breakgraph.bench import timing"),
    ],
)
def test_a_wrong_layer_is_seen(name: str, text: str) -> None:
    module = parse_module(text, name)
    assert any(layer_fault(module, item) for item in module.imports() if is_own(item))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("breakgraph.graph.plan", "if TYPE_CHECKING:\n    from breakgraph.backends.base import Backend"),
        ("breakgraph.graph.plan", "from breakgraph.errors import CaptureError\nfrom breakgraph import errors"),
        ("breakgraph.graph.plan", "from . import pool\nfrom .pool import Pool"),
        ("breakgraph.report.render", "from breakgraph.bench.result import Result"),
        ("breakgraph.bench.result", "from breakgraph import __version__"),
    ],
)
def test_a_right_layer_is_left_alone(name: str, text: str) -> None:
    module = parse_module(text, name)
    assert not [fault for item in module.imports() if is_own(item) if (fault := layer_fault(module, item))]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("breakgraph.graph.plan", "import numpy"),
        ("breakgraph.runners.base", "def f():\n    from transformers import AutoConfig"),
        ("breakgraph.report.render", "import torch.nn"),
        ("breakgraph.models.weights", "import gguf"),
        ("breakgraph.models.weights", "import left_pad"),
        ("breakgraph.engine.llm", "def f():\n    import fastapi"),
        ("breakgraph.cli.serve", "from pydantic import BaseModel"),
        ("breakgraph.server.app", "import left_pad"),
    ],
)
def test_a_wrong_package_is_seen(name: str, text: str) -> None:
    module = parse_module(text, name)
    assert [third_party_fault(module, item, declared_packages()) for item in module.imports()] != [None]


def test_sources_are_found() -> None:
    names = {module.name for module in all_modules()}
    assert {"breakgraph", "breakgraph.errors", "breakgraph.graph", "breakgraph.bench.result"} <= names
    assert (SRC / "breakgraph" / "py.typed").is_file()
