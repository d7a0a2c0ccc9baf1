"""Breakable CUDA graphs for PyTorch callables, and an engine that runs transformers models with them.

The names below are loaded when they are first used: `import breakgraph` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from breakgraph import errors

if TYPE_CHECKING:
    from breakgraph.api import capture
    from breakgraph.engine.guided_params import GuidedDecodingParams
    from breakgraph.engine.llm import LLM
    from breakgraph.engine.sampling import SamplingParams
    from breakgraph.graph import Live, PlanFamily, break_graph, constant, eager_on_graph, mark_eager

__version__ = "0.1.0"

__all__ = [
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

_SOURCES = {
    "GuidedDecodingParams": "breakgraph.engine.guided_params",
    "LLM": "breakgraph.engine.llm",
    "Live": "breakgraph.graph",
    "PlanFamily": "breakgraph.graph",
    "SamplingParams": "breakgraph.engine.sampling",
    "break_graph": "breakgraph.graph",
    "capture": "breakgraph.api",
    "constant": "breakgraph.graph",
    "eager_on_graph": "breakgraph.graph",
    "mark_eager": "breakgraph.graph",
}

# Hidden from type checkers: a visible module __getattr__ would make every misspelt name type-check.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _SOURCES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_SOURCES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
