"""What a user imports: the public names, and that nothing heavy is loaded before it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import breakgraph
from contract.source_tree import SRC, all_modules

PUBLIC = [
    "LLM",
    "GuidedDecodingParams",
    "Live",
    "PlanFamily",
    "SamplingParams",
    "__version__",
    "break_graph",
    "capture",
    "constant",
    "eager_on_graph",
    "errors",
    "mark_eager",
]
HEAVY = ("torch", "transformers", "numpy", "rich", "tqdm", "fastapi", "prometheus_client", "pydantic", "uvicorn")


def loaded_after(statement: str) -> str:
    """The heavy packages that a fresh interpreter has loaded after one statement, comma separated."""
    script = f"import sys; {statement}; print(','.join(name for name in {HEAVY!r} if name in sys.modules))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SRC)!r}); {script}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_public_names_are_frozen_and_sorted() -> None:
    assert breakgraph.__all__ == PUBLIC
    assert sorted(PUBLIC, key=lambda name: (not name.isupper(), name)) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves(name: str) -> None:
    assert getattr(breakgraph, name) is not None
    assert name in dir(breakgraph)


def test_a_name_is_the_one_of_its_source() -> None:
    assert breakgraph.PlanFamily is importlib.import_module("breakgraph.graph").PlanFamily


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        breakgraph.nonsense  # noqa: B018


@pytest.mark.parametrize("module", [m.name for m in all_modules() if m.is_package])
def test_package_exports_resolve(module: str) -> None:
    package = importlib.import_module(module)
    missing = [name for name in getattr(package, "__all__", []) if not hasattr(package, name)]
    assert not missing


@pytest.mark.parametrize(
    "statement",
    [
        "import breakgraph; breakgraph.errors.CaptureError",
        "import breakgraph.bench.result",
        "import breakgraph.cli.main; breakgraph.cli.main.build_parser()",
    ],
)
def test_loads_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == ""


def test_the_probe_sees_a_heavy_import() -> None:
    assert loaded_after("import numpy") == "numpy"
