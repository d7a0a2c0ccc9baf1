"""A whole benchmark: ceilings first, then what is asked for, then peers; the result holds all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from importlib import import_module

import torch

from breakgraph.bench.arms import EAGER, Setting, describe, give_memory_back
from breakgraph.bench.ceilings import measure_ceilings
from breakgraph.bench.config import BenchConfig, CaptureBench
from breakgraph.bench.peers import peer_notes, run_peer
from breakgraph.bench.result import Metric, Result, Row, Shape, here
from breakgraph.engine.config import Hardware
from breakgraph.errors import ConfigError
from breakgraph.models import resolve_model

INTERRUPTED = "interrupted: only what was measured until then"
_CASE = ("tokens", "requests", "context")
_TURNS = "backends take turns, the GPU rests behind each step for as long as it took; medians"
_NOTES = {
    "prefill": "time: attention metadata, body and last-token logits, synchronised; " + _TURNS + "; "
    "host: until the call returns",
    "decode": "time: attention metadata, body and logits, synchronised; " + _TURNS + "; bytes_floor: "
    "weights and KV cache once at the rate of a copy",
    "serve": "all requests at once, greedy, answers of one length; prefix cache off; what warms up is not counted",
    "capture": "time: warm-up and capture of the buckets, the fastest of the rounds; start: all until the first "
    "request can run, compiling and loading included; driver: only sums mean something",
    "compare": "build: warm-up, compile and capture of all buckets, from an empty compile cache; compile: for a traced "
    "forward also two runs of each bucket, with fusion what the first eager step takes beyond the second; replay: the "
    "step of one request that fills the bucket, backends of one fusion take turns; graphs: launches of a replay; own "
    "lines: those that are not blank in the source files that this way needs beyond what all graphs share",
}
_EXCLUDED = {
    "prefill": ("sampling", "tokenisation"),
    "decode": ("sampling", "tokenisation"),
    "serve": ("tokenisation", "loading", "capture"),
    "capture": (),
}


class BenchInterrupted(KeyboardInterrupt):
    """Ctrl-C, with what was measured before it."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


def run_bench(config: BenchConfig, command: str, tell: Callable[[str], None] = print) -> Result:
    """Measures what `config` asks for.

    On the emulated CPU device nothing is timed: rows hold counts, bytes and equality.

    Args:
        command: the command line to repeat it with.
        tell: takes each line of progress; the ceilings come first.

    Raises:
        ConfigError: the model or the device cannot be had, or nothing of what was asked for could run.
        BenchInterrupted: Ctrl-C after the first row.
    """
    device = Hardware.detect(config.device).device
    about = "compare" if isinstance(config, CaptureBench) and config.compare else config.kind
    source = resolve_model(config.model, load_format="dummy")
    dtype = _dtype(config, device, source.dtype)
    run, where, versions = here(command, device)
    name = str(dtype).removeprefix("torch.")
    tell(f"{config.kind}: {source.name}, random weights, {name}, {where.device_name}")
    rows: list[Row] = []
    ceilings = None
    if where.emulated:
        tell("emulated: the CPU device shows that captures are right; it is not timed and claims no speed")
    else:
        ceilings = measure_ceilings(device, dtype)
        rows += ceilings.rows()
        for row in rows:
            tell(describe(row))
    setting = Setting(dataclasses.replace(config, device=str(device)), source, device, dtype, ceilings, tell)
    measured: list[Row] = []

    def result(*notes: str) -> Result:
        return Result(
            run=run,
            where=where,
            versions=versions,
            shape=Shape(model=source.name, dtype=name),
            rows=(*rows, *with_ratios(measured)),
            notes=("random weights", _NOTES[about], *peer_notes(config.chosen_peers), *setting.not_run, *notes),
            excluded=_EXCLUDED[config.kind],
        )

    try:
        for row in _measured(setting):
            measured.append(row)
    except KeyboardInterrupt:
        if measured:
            raise BenchInterrupted(result(INTERRUPTED)) from None
        raise
    if not measured:
        raise ConfigError("nothing of what was asked for could run: " + "; ".join(setting.not_run))
    return result()


def _measured(setting: Setting) -> Iterator[Row]:
    """Ours, then those of peers."""
    yield from import_module(f"breakgraph.bench.{setting.config.kind}").measure(setting)
    give_memory_back()  # peers need it
    for peer in setting.config.chosen_peers:
        answer = run_peer(peer, setting)
        if isinstance(answer, str):
            setting.leave_out(peer, answer)
            continue
        for row in answer:
            setting.tell(describe(row))
        yield from answer


def with_ratios(rows: list[Row]) -> list[Row]:
    """The time of plain eager over each row's own, for rows of the same case: unfused, with the same attention if it
    was run with it."""
    done = []
    for row in rows:
        base = _plain_eager(row, rows)
        if base is None or "time" not in row.metrics:
            done.append(row)
            continue
        ratio = Metric(value=base.metrics["time"].value / row.metrics["time"].value, unit="ratio")
        done.append(dataclasses.replace(row, metrics={**row.metrics, "eager_over_time": ratio}))
    return done


def _plain_eager(row: Row, rows: list[Row]) -> Row | None:
    case = [row.params.get(name) for name in _CASE]
    plain = [
        other
        for other in rows
        if other.name == row.name
        and other.params.get("backend") == EAGER
        and other.params.get("fusion") == "none"
        and [other.params.get(name) for name in _CASE] == case
        and "time" in other.metrics
    ]
    same = [other for other in plain if other.params.get("attention") == row.params.get("attention")]
    return next(iter(same or plain), None)


def _dtype(config: BenchConfig, device: torch.device, own: torch.dtype | None) -> torch.dtype:
    """As the engine settles it."""
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    return torch.float32 if device.type == "cpu" else own or torch.bfloat16
