"""What torch's profiler saw, as plain events; and how long the GPU was busy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
ANNOTATION = "user_annotation"
"""Category of `record_function` on the host."""


@dataclass(frozen=True)
class Event:
    """One thing that took time, in microseconds on the profiler's clock, which host and GPU share."""

    name: str
    category: str
    start_us: float
    duration_us: float
    track: str
    """The thread or stream."""


def profiled(run: Callable[[], object], device: torch.device, *, host: bool) -> list[Event]:
    """Kernels, copies and fills of one call; with `host` also its `record_function` blocks, which slows the host."""
    activities = [ProfilerActivity.CPU] if host else []
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return list(_events(document["traceEvents"]))


def _events(entries: Iterable[dict[str, object]]) -> Iterable[Event]:
    for entry in entries:
        category = entry.get("cat")
        if entry.get("ph") == "X" and category in (*GPU_CATEGORIES, ANNOTATION):
            times = float(str(entry["ts"])), float(str(entry["dur"]))
            yield Event(str(entry["name"]), str(category), *times, track=str(entry["tid"]))


def busy_us(events: Iterable[Event]) -> float:
    """Length of the union of the GPU's events: two kernels at the same time count once."""
    total, end = 0.0, float("-inf")
    for event in sorted((e for e in events if e.category in GPU_CATEGORIES), key=lambda e: e.start_us):
        stop = event.start_us + event.duration_us
        total += max(0.0, stop - max(end, event.start_us))
        end = max(end, stop)
    return total


@dataclass(frozen=True)
class KernelTime:
    """One kernel, copy or fill in one run."""

    name: str
    ms: float
    """Of all its calls together."""
    calls: float


def kernel_times(events: Iterable[Event], rounds: int = 1) -> list[KernelTime]:
    """By name, the longest first, of `rounds` runs that all did the same."""
    durations: dict[str, list[float]] = {}
    for event in events:
        if event.category in GPU_CATEGORIES:
            durations.setdefault(event.name, []).append(event.duration_us)
    found = [KernelTime(name, sum(times) / rounds / 1e3, len(times) / rounds) for name, times in durations.items()]
    return sorted(found, key=lambda kernel: -kernel.ms)


@dataclass(frozen=True)
class GpuProfile:
    """What the GPU did in one run."""

    busy_ms: float
    """Kernels and copies: the floor of any way to launch them."""
    kernels: list[KernelTime]


def gpu_profile(run: Callable[[], object], device: torch.device, rounds: int = 3) -> GpuProfile:
    """Of one run, by the mean of several."""

    def several() -> None:
        for _ in range(rounds):
            run()

    events = profiled(several, device, host=False)
    return GpuProfile(busy_us(events) / rounds / 1e3, kernel_times(events, rounds))
