"""The latencies of prefill steps in a result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from breakgraph.bench.result import Result, Row

BACKENDS = ("eager", "breakable", "full", "auto")
"""First in tables and legends; others follow by name."""


@dataclass(frozen=True)
class Latency:
    """One step of one backend, in ms. What was not measured is None."""

    tokens: int
    requests: int
    backend: str
    fusion: str
    attention: str
    time: float
    p10: float | None
    p90: float | None
    gpu_busy: float | None
    roofline: float | None


def latencies(result: Result) -> list[Latency]:
    """Of rows that have a `time`."""
    return [_latency(row) for row in result.rows if row.name == "prefill" and "time" in row.metrics]


def _latency(row: Row) -> Latency:
    def value(name: str) -> float | None:
        return row.metrics[name].value if name in row.metrics else None

    return Latency(
        tokens=int(str(row.params["tokens"])),
        requests=int(str(row.params["requests"])),
        backend=str(row.params.get("backend")),
        fusion=str(row.params.get("fusion", "")),
        attention=str(row.params.get("attention", "")),
        time=row.metrics["time"].value,
        p10=value("p10"),
        p90=value("p90"),
        gpu_busy=value("gpu_busy"),
        roofline=value("roofline"),
    )


def labels(found: Iterable[Latency]) -> dict[tuple[str, str, str], str]:
    """(backend, fusion, attention) to a name for people: as short as tells them apart, in the order to show them."""
    keys = list(dict.fromkeys((one.backend, one.fusion, one.attention) for one in found))
    ordered = sorted(keys, key=lambda key: (BACKENDS.index(key[0]) if key[0] in BACKENDS else len(BACKENDS), key))
    ours = [key for key in keys if key[0] in BACKENDS]
    differ = [len({key[part] for key in ours}) > 1 for part in (1, 2)]
    named = {}
    for key in ordered:
        more = [key[1] if key[1] != "none" else "unfused"] if differ[0] else []
        more += [key[2]] if differ[1] or (key not in ours and key[2] not in ("", "its own")) else []
        named[key] = key[0] + (f" ({', '.join(more)})" if more else "")
    return named


def busy_of(found: Iterable[Latency], tokens: int) -> float | None:
    """The GPU's busy time at that size: of the breakable backend, as it runs the most kernels of those captured."""
    known = {one.backend: one.gpu_busy for one in found if one.tokens == tokens and one.gpu_busy is not None}
    return next((known[name] for name in ("breakable", "full", "eager") if name in known), None)
