"""The capture library: CUDA-graph segments with eager breaks between them. See README.md in this folder."""

from breakgraph.graph.audit import AuditReport, audit
from breakgraph.graph.declared import constant
from breakgraph.graph.device import Device, Peak, get_device
from breakgraph.graph.eager_break import EagerBreak, MarkedFunction, break_graph, eager_on_graph, mark_eager
from breakgraph.graph.family import PlanFamily
from breakgraph.graph.hazards import Hazard, HazardReport, OnHazard
from breakgraph.graph.live import Live
from breakgraph.graph.packing import AllocationTrace, choose_runs
from breakgraph.graph.plan import OutputPolicy, Plan
from breakgraph.graph.report import PlanReport, StepReport
from breakgraph.graph.shape_key import ShapeKey
from breakgraph.graph.watch import BreakWatcher, watch_eager

__all__ = [
    "AllocationTrace",
    "AuditReport",
    "BreakWatcher",
    "Device",
    "EagerBreak",
    "Hazard",
    "HazardReport",
    "Live",
    "MarkedFunction",
    "OnHazard",
    "OutputPolicy",
    "Peak",
    "Plan",
    "PlanFamily",
    "PlanReport",
    "ShapeKey",
    "StepReport",
    "audit",
    "break_graph",
    "choose_runs",
    "constant",
    "eager_on_graph",
    "get_device",
    "mark_eager",
    "watch_eager",
]
