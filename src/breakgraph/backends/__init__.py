"""How a forward becomes replayable. Backends know nothing of phases, batches or padding."""

from __future__ import annotations

from breakgraph.backends.base import Backend
from breakgraph.backends.registry import BACKENDS, backend_class, make_backend

__all__ = ["BACKENDS", "Backend", "backend_class", "make_backend"]
