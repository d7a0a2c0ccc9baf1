"""Some phases by another implementation than the rest."""

from __future__ import annotations

from breakgraph.attention.base import AttentionBackend, GraphSupport
from breakgraph.attention.dispatching import DispatchingAttention
from breakgraph.attention.step import AttentionStep


class PhaseAttention(DispatchingAttention):
    """Another implementation for some phases."""

    name: str = "auto"

    def __init__(self, default: AttentionBackend, by_phase: dict[str, AttentionBackend]) -> None:
        super().__init__(default, *by_phase.values())
        self.default = default
        self.by_phase = by_phase

    def for_phase(self, phase: str) -> AttentionBackend:
        return self.by_phase.get(phase, self.default)

    def graph_support(self, phase: str) -> GraphSupport:
        return self.for_phase(phase).graph_support(phase)

    def _choose(self, step: AttentionStep) -> AttentionBackend:
        return self.for_phase(step.phase)
