"""Hugging Face causal language models behind one call: packed tokens in, logits out.

The names below are loaded when they are first used: `transformers` takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breakgraph.models.fusion import fuse
    from breakgraph.models.hf import HFModel
    from breakgraph.models.loading import load_model, loading_bars
    from breakgraph.models.presets import PRESETS
    from breakgraph.models.source import ModelSource, resolve_model
    from breakgraph.models.support import check_supported
    from breakgraph.models.tokenizer import load_tokenizer

__all__ = [
    "PRESETS",
    "HFModel",
    "ModelSource",
    "check_supported",
    "fuse",
    "load_model",
    "load_tokenizer",
    "loading_bars",
    "resolve_model",
]

_SOURCES = {
    "HFModel": "hf",
    "ModelSource": "source",
    "PRESETS": "presets",
    "check_supported": "support",
    "fuse": "fusion",
    "load_model": "loading",
    "load_tokenizer": "tokenizer",
    "loading_bars": "loading",
    "resolve_model": "source",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _SOURCES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_SOURCES[name]}"), name)
