"""Runners own a phase: its ladder, static buffers, attention metadata, padding and admission."""

from __future__ import annotations

from breakgraph.runners.admission import EagerReason, admit
from breakgraph.runners.auto import AutoDecodeRunner, AutoPrefillRunner, decode_runner_class, prefill_runner_class
from breakgraph.runners.base import Forward, Progress, Runner
from breakgraph.runners.batch import Ints, StepBatch
from breakgraph.runners.decode import DecodeRunner, decode_spec
from breakgraph.runners.ladder import bucket_for, check_ladder, default_ladder, unused_buckets
from breakgraph.runners.memory import PhaseMemory
from breakgraph.runners.prefill import PrefillRunner, SlottedPrefillRunner, prefill_spec
from breakgraph.runners.spec import FieldSpec, Pad, PhaseSpec
from breakgraph.runners.stats import RunnerStats

__all__ = [
    "AutoDecodeRunner",
    "AutoPrefillRunner",
    "DecodeRunner",
    "EagerReason",
    "FieldSpec",
    "Forward",
    "Ints",
    "Pad",
    "PhaseMemory",
    "PhaseSpec",
    "PrefillRunner",
    "Progress",
    "Runner",
    "RunnerStats",
    "SlottedPrefillRunner",
    "StepBatch",
    "admit",
    "bucket_for",
    "check_ladder",
    "decode_runner_class",
    "decode_spec",
    "default_ladder",
    "prefill_runner_class",
    "prefill_spec",
    "unused_buckets",
]
