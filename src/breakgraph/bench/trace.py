"""One replay as a trace that Perfetto and chrome://tracing open: the host's steps by name, and the GPU's kernels.

The format is the JSON object form of Chrome's trace events, with complete events ("X") in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from breakgraph.bench.profiler import ANNOTATION, GPU_CATEGORIES, Event, profiled
from breakgraph.errors import ConfigError
from breakgraph.graph import PlanFamily
from breakgraph.runners.base import Runner

HOST, GPU = 1, 2
_STEP_KINDS = ("segment", "break")
_WARM_UPS = 5
"""More than a plan measures the host times of, so that the profiler is in none of them."""


def export(replay: Callable[[], object], family: PlanFamily, path: Path | str) -> int:
    """Replays a few times, then once under torch's profiler, and writes what it saw.

    The profiler slows the host down: read the order and the overlap from the trace, host times from `explain()`.

    Args:
        replay: Replays one plan of `family`, such as `plan.replay`.
        path: Of the JSON file; its folder has to exist.

    Returns:
        The number of steps in the trace.

    Raises:
        ConfigError: `replay` replayed no plan of `family`, or the file cannot be written.
    """
    device = family.device.torch_device
    for _ in range(_WARM_UPS):
        replay()
    with family.annotating(torch.profiler.record_function):
        events = profiled(replay, device, host=True)
    steps = [e for e in events if e.category == ANNOTATION and e.name.split(" ")[0] in _STEP_KINDS]
    if not steps:
        raise ConfigError("expected a call that replays a plan of this family, and none was replayed; pass plan.replay")
    kernels = [event for event in events if event.category in GPU_CATEGORIES]
    _write(Path(path), document(steps, kernels, emulated=family.device.emulated))
    return len(steps)


def export_runner(runner: Runner, path: Path | str) -> int:
    """The largest bucket of a runner, on a dummy step that writes to the reserved slot only; else as `export`.

    Raises:
        ConfigError: the runner captured nothing, or the file cannot be written.
    """
    key = runner.spec.key(runner.spec.ladder[-1])
    if not (runner.backend.captures and runner.backend.captured(key)):
        raise ConfigError(
            f"expected a captured {runner.spec.phase} bucket to trace, and backend {runner.backend.name!r} has none; "
            "capture with backend 'breakable' or 'full'"
        )
    with runner.in_bucket(runner.spec.dummy_batch(key.size)):
        return export(lambda: runner.backend.replay(key), runner.backend.family, path)


def document(steps: Iterable[Event], kernels: Iterable[Event], *, emulated: bool) -> dict[str, Any]:
    """The trace: a process for the host, one for the GPU with a thread a stream. Time starts with the first step."""
    steps, kernels = list(steps), list(kernels)
    start = min(event.start_us for event in steps)
    streams = {track: number for number, track in enumerate(sorted({event.track for event in kernels}), start=1)}
    entries = [
        _named("process_name", HOST, 0, "host" + (" (emulated device: claims no speed)" if emulated else "")),
        _named("thread_name", HOST, 1, "segments and breaks"),
    ]
    if kernels:
        entries.append(_named("process_name", GPU, 0, "GPU"))
    entries += [_named("thread_name", GPU, number, f"stream {track}") for track, number in streams.items()]
    entries += [_complete(event, start, HOST, 1, event.name.split(" ")[0]) for event in steps]
    entries += [_complete(event, start, GPU, streams[event.track], event.category) for event in kernels]
    return {"traceEvents": entries, "displayTimeUnit": "ns"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(event: Event, start: float, process: int, thread: int, category: str) -> dict[str, Any]:
    times = {"ts": round(event.start_us - start, 3), "dur": round(event.duration_us, 3)}
    return {"ph": "X", "name": event.name, "cat": category, "pid": process, "tid": thread, **times}


def _write(path: Path, content: dict[str, Any]) -> None:
    """In one step: the old file, or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
