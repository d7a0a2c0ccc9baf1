"""Checks that replays give what eager gives, and finds where they don't."""

from breakgraph.verify.batches import Limits
from breakgraph.verify.call import verify_call
from breakgraph.verify.live import LiveCheck
from breakgraph.verify.report import Culprit, StepReport, Verdict, VerifyReport, VerifySummary
from breakgraph.verify.steps import NUM_BYSTANDERS, verify_runners

__all__ = [
    "NUM_BYSTANDERS",
    "Culprit",
    "Limits",
    "LiveCheck",
    "StepReport",
    "Verdict",
    "VerifyReport",
    "VerifySummary",
    "verify_call",
    "verify_runners",
]
