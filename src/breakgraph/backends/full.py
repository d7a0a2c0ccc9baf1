"""One graph a key, marked calls included."""

from __future__ import annotations

from breakgraph.backends.base import PlanBackend


class FullBackend(PlanBackend):
    """Records everything. Only for forwards whose marked calls read their metadata from static tensors."""

    name = "full"
    records_breaks = True
